"""What loops read of single parameters and gradients, on a model that is cut over tp, and beside it in one plain process."""

import contextlib
import copy
import functools
import io
import math
import pickle

import safetensors.torch
import torch
import torch.nn.functional as F
from step.plain import mine
from techniques.tp.searches import searched_once
from torch import nn
from torch.nn.modules import module as all_modules
from torch.nn.utils import parameters_to_vector

import shardwise as sw
from shardwise.errors import UsageError

VOCAB = 11  # two ranks have 6 and 5 rows


class Block(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 16), nn.Linear(16, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Words().double()


def cut(world):
    with searched_once(build):
        return sw.parallelize(build(), world, sharding=sw.Sharding(min_unit_bytes=0))


def batches(turn, lengths=(5, 3, 4, 6)):
    generator = torch.Generator().manual_seed(turn)
    rows = [torch.randint(0, VOCAB, (2, length + 1), generator=generator) for length in lengths]
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in rows]


def loss_of(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def as_it_is(tensor):
    return tensor


# ---- loops: a step with gradients, which ``gradients()`` computes anew ------------------------------------------


def sam(model, optim, gradients, whole):
    """Sharpness-aware minimisation: the step is taken by the gradients at the end of a step uphill."""
    params = list(model.parameters())
    norm = torch.stack([whole(p.grad).norm() for p in params]).norm()
    before = [p.detach().clone() for p in params]
    for param in params:
        param.add_(param.grad * (0.5 / (norm + 1e-12)))
    optim.zero_grad()
    gradients()
    for param, value in zip(params, before, strict=True):
        param.copy_(value)
    optim.step()


def adaptive_sam(model, optim, gradients, whole):
    """The same, by the size of the weights."""
    params = list(model.parameters())
    norm = sum(whole(p.abs() * p.grad).square().sum() for p in params).sqrt()
    steps = [p.square() * p.grad * (0.5 / norm) for p in params]
    torch._foreach_add_(params, steps)
    optim.zero_grad()
    gradients()
    torch._foreach_sub_(params, steps)
    optim.step()


def lamb(model, _optim, _gradients, whole):
    """The step of each layer is as long as its weights are."""
    for param in model.parameters():
        update = param.grad / (param.grad.abs().sqrt() + 1e-3) + 0.1 * param
        param.add_(update, alpha=-0.1 * float(whole(param).norm() / whole(update).norm()))


def noise(model, optim, _gradients, whole):
    """Each gradient is changed by a part of its standard deviation, a quantile of it, and a mean over elements."""
    for param in model.parameters():
        grad = param.grad
        most = torch.quantile(whole(grad.abs()), 0.9).item()
        scale = whole(grad).std() + whole(param.detach().abs()).mean()
        grad.clamp_(-most, most).add_(torch.sign(grad) * scale, alpha=0.1)
    optim.step()


def averages(model, optim, _gradients, whole):
    """The step depends on what is kept of |gradients|, and on how like gradients are to weights."""
    for param in model.parameters():
        kept = torch.zeros_like(param.grad).lerp_(param.grad.abs(), 0.3)
        like = F.cosine_similarity(whole(param).flatten(), whole(param.grad).flatten(), dim=0)
        if whole(kept).max() > 1e-3:
            param.grad.div_(kept + 0.1 + like.abs())
    optim.step()


def logged(model, optim, _gradients, whole):
    """What a log shows, the mean over all elements among it, sets the step size."""
    number = sum(param.numel() for param in model.parameters())
    mean = sum(float(whole(param.detach()).abs().sum()) for param in model.parameters()) / number
    largest = max(torch.linalg.matrix_norm(whole(p), 2).item() for p in model.parameters() if p.dim() == 2)
    optim.param_groups[0]["lr"] = 0.1 * mean * largest
    optim.step()


LOOPS = (sam, adaptive_sam, lamb, noise, averages, logged)


def train(model, loop, gradients_of, whole):
    optim = sw.local_optimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    for turn in range(3):
        gradients = functools.partial(gradients_of, model, turn)
        gradients()
        with torch.no_grad():
            loop(model, optim, _with_grad(gradients), whole)
        optim.zero_grad()


def _with_grad(gradients):
    def call():
        with torch.enable_grad():
            gradients()

    return call


def of_ranks(layout, whole):
    """Whole parameters after each loop, or its error, by the name of the loop."""
    found = {}
    for loop in LOOPS:
        with sw.init(layout, device="cpu", timeout_s=30) as world:
            model = cut(world)

            def gradients(model, turn, world=world):
                with sw.window(model, mine(batches(turn), world)) as w:
                    for batch in w:
                        (loss_of(model, batch) / w.num_tokens).backward()

            try:
                train(model, loop, gradients, whole)
                found[loop.__name__] = {n: sw.full_tensor(p).detach() for n, p in model.named_parameters()}
            except UsageError as error:
                found[loop.__name__] = str(error)
    return found


def alone():
    found = {}
    for loop in LOOPS:

        def gradients(model, turn):
            given = batches(turn)
            num = sum(batch["labels"].numel() for batch in given)
            (sum(loss_of(model, batch) for batch in given) / num).backward()

        model = build()
        train(model, loop, gradients, as_it_is)
        found[loop.__name__] = {name: param.detach() for name, param in model.named_parameters()}
    return found


# ---- single reads ---------------------------------------------------------------------------------------------

READS = {
    "norm": lambda x: x.norm(),
    "torch.norm": lambda x: torch.norm(x, 1),
    "sum": lambda x: x.sum(),
    "sum of squares": lambda x: (x * x).sum(),
    "power": lambda x: x.detach().pow(2).clone().float().mean().sqrt(),
    "mean": lambda x: x.abs().mean(),
    "std": torch.std,
    "var": lambda x: x.var(unbiased=False),
    "max": lambda x: x.max(),
    "max of dim": lambda x: x.max(dim=0),
    "amax": torch.amax,
    "argmax": lambda x: x.argmax(),
    "quantile": lambda x: x.quantile(0.5),
    "median": lambda x: x.median(),
    "dim that is cut": lambda x: x.norm(dim=0),
    "kept dim": lambda x: x.sum(0, keepdim=True),
    "dot": lambda x: torch.dot(x.flatten(), x.flatten()),
    "vdot": lambda x: torch.vdot(x.view(-1), x.view(-1)),
    "product": lambda x: x.t() @ x,
    "einsum": lambda x: torch.einsum("ij,ij->", x, x),
    "linalg.norm": torch.linalg.norm,
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "svd": torch.linalg.svdvals,
    "_foreach_norm": lambda x: torch._foreach_norm([x, x]),
    "vector": lambda x: parameters_to_vector([x]).norm(),
    "cosine": lambda x: F.cosine_similarity(x, x, dim=0),
    "mse_loss": lambda x: F.mse_loss(x, x * 0),
    "normalize": lambda x: F.normalize(x, dim=0),
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0),
    "all": lambda x: x.isfinite().all(),
    "nonzero": lambda x: (x > 0).nonzero(),
    "mask": lambda x: x[x > 0],
    "by its place": lambda x: x[0],
    "one element": lambda x: x[1, 2].item(),
    "write by its place": lambda x: x.detach().__setitem__(0, 0.0),
    "equal": lambda x: torch.equal(x, x.clone()),
    "allclose": lambda x: torch.allclose(x, x.clone()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "iterate": lambda x: list(x),
    "randn_like": torch.randn_like,
    "normal": lambda x: torch.normal(x, 0.1),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: F.dropout(x, 0.5),
    "normal_": lambda x: torch.zeros_like(x).normal_(),
    "data": lambda x: x.data.norm(),
    "through lists": lambda x: torch.stack([x, x * 2]).sum(),
    "written to": lambda x: x.new_zeros(x.shape).copy_(x).sum(),
    "whole of dp alone": lambda x: getattr(x, "full_tensor", None) and x.t().full_tensor(),
    "deepcopy": lambda x: copy.deepcopy(nn.Parameter(x.detach())).sum(),
    "new parameter": lambda x: nn.Parameter(x.detach().clone()).sum(),
    "a view that keeps no dim": lambda x: x.view(-1, x.shape[1] // 2),
    "torch.save": lambda x: torch.save(x.detach(), io.BytesIO()),
    "pickle": lambda x: pickle.dumps({"weight": x}),
    "copy": copy.copy,
    "safetensors": lambda x: safetensors.torch.save({"weight": x.detach()}),
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "memory": lambda x: x.untyped_storage(),
    "vmap": lambda x: torch.vmap(torch.sum)(x.detach()),
}


def single_reads(layout):
    """How each read of a parameter, and of its gradient, ends on this rank."""
    found = {}
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = cut(world)
        with sw.window(model, mine(batches(0), world)) as w:
            for batch in w:
                (loss_of(model, batch) / w.num_tokens).backward()
        param = model.get_parameter("blocks.0.up.weight")
        for name, read in READS.items():
            for of, tensor in {"parameter": param, "gradient": param.grad}.items():
                try:
                    found[name, of] = f"no error: {read(tensor)}"
                except UsageError as error:
                    found[name, of] = str(error)
                except Exception as error:
                    found[name, of] = f"{type(error).__name__}: {error}"
    return found


# ---- moments: when a norm is read, of what and by whose code ---------------------------------------------------


def _reads(result, of):
    """A hook that reads a norm and gives back ``result`` of its arguments."""

    def hook(*args):
        of(*args).norm()
        return result(*args)

    return hook


def _nothing(*_):
    return None


def _kept_gradient(run):
    grad = run.up.grad
    run.optim.step()
    grad.norm()


def _state(run):
    run.optim.step()
    run.optim.state[run.up]["momentum_buffer"].norm()


def _saved_state(run):
    run.optim.step()
    torch.save(run.optim.state_dict(), io.BytesIO())


def _loaded_state(run):
    run.optim.step()
    state = sw.full_optimizer_state_dict(run.model, run.optim)
    other = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    sw.load_full_optimizer_state_dict(run.model, other, state)
    other.state[run.up]["momentum_buffer"].norm()


def _after_a_step_that_raised(run):
    run.optim.param_groups[0]["lr"] = "fast"
    with contextlib.suppress(TypeError):
        run.optim.step()
    run.up.norm()


def _after_a_local_step_that_raised(run):
    sw.local_optimizer(run.optim)
    _after_a_step_that_raised(run)


def _in_a_closure(run):
    run.optim.step(lambda: run.up.grad.norm())


def _hook(register, of=lambda module, *_: module.weight):
    def read(run):
        getattr(run.model.blocks[0].up, register)(_reads(_nothing, of))
        run.gradients()

    return read


def _global_hook(run):
    with all_modules.register_module_forward_hook(_reads(_nothing, lambda *_: run.up)):
        run.gradients()


def _hook_of_a_block(run):
    """Called by itself, not by the model."""
    run.model.blocks[0].register_forward_hook(_reads(_nothing, lambda module, *_: module.up.weight))
    with torch.no_grad():
        run.model.blocks[0](torch.ones(1, 2, 8).double())


def _hook_on_an_activation(run):
    def put_on(_module, _args, output):
        output.register_hook(_reads(_nothing, lambda _: run.up))

    run.model.blocks[0].register_forward_hook(put_on)
    run.gradients()


def _tensor_hook(hook):
    def read(run):
        run.up.register_hook(hook)
        run.gradients()

    return read


def _after_a_forward_that_raised(run):
    with contextlib.suppress(IndexError), torch.no_grad():
        run.model.blocks[1].register_forward_pre_hook(lambda *_: [].pop())
        run.model(batches(0)[0]["input_ids"])
    run.up.norm()


MOMENTS = {
    "a gradient that was kept, after the step": _kept_gradient,
    "the optimizer's state": _state,
    "the optimizer's state, saved": _saved_state,
    "the optimizer's state, loaded": _loaded_state,
    "after a step that raised": _after_a_step_that_raised,
    "after a local step that raised": _after_a_local_step_that_raised,
    "after a forward that raised": _after_a_forward_that_raised,
    "in a step's closure": _in_a_closure,
    "a hook before forward": _hook("register_forward_pre_hook"),
    "a hook after forward": _hook("register_forward_hook"),
    "a hook after backward": _hook("register_full_backward_hook"),
    "a hook before backward": _hook("register_full_backward_pre_hook"),
    "a hook of all modules": _global_hook,
    "a hook of a block alone": _hook_of_a_block,
    "a hook on an activation": _hook_on_an_activation,
    "a hook on a parameter": _tensor_hook(lambda grad: grad / grad.norm()),
    "a hook on a parameter, element by element": _tensor_hook(lambda grad: grad.clamp(-0.1, 0.1)),
}


class _Run:
    def __init__(self, world):
        self.model = cut(world)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.up, self._world = self.model.blocks[0].up.weight, world
        self.gradients()

    def gradients(self):
        with sw.window(self.model, mine(batches(0), self._world)) as w:
            for batch in w:
                (loss_of(self.model, batch) / w.num_tokens).backward()


def moments(layout, stride):
    """How each read ends on this rank."""
    found = {}
    for name, read in [*MOMENTS.items()][::stride]:
        with sw.init(layout, device="cpu", timeout_s=30) as world:
            run = _Run(world)
            try:
                found[name] = f"no error: {read(run)}"
            except UsageError as error:
                found[name] = str(error)
    return found


def allowed(layout):
    """What is right on a part, as it is or put together; and that the classes of torch are left where they must be."""
    found, seen = {}, []
    with sw.init(layout, device="cpu", timeout_s=30) as world:
        model = cut(world)
        model.blocks[0].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.norm(dim=1).ndim))
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        optim.register_step_pre_hook(lambda *_: None)
        with sw.window(model, mine(batches(0), world)) as w:
            for batch in w:
                (loss_of(model, batch) / w.num_tokens).backward()
        up, down = model.blocks[0].up.weight, model.blocks[0].down.weight
        with torch.no_grad():
            found["row norms"] = sw.full_tensor(up.norm(dim=1, keepdim=True) * torch.ones_like(up))
            found["turned"] = sw.full_tensor((up.t() * 2).t())
            found["filters"] = sw.full_tensor((up.view(up.shape[0], -1) ** 2).reshape(up.shape[0], -1))
            found["where"] = sw.full_tensor(torch.where(down > 0, down, down.grad))
        found["norms"] = sw.parameter_norms(model)
        found["largest of gradients"] = sw.parameter_norms(model, of="gradients", norm_type="inf")
        found["products"] = sw.parameter_norms(model, {n: p * p.grad for n, p in model.named_parameters()}, norm_type=1)
        found["norm of all"] = sw.clip_grad_norm_(model, math.inf)
        found["number"] = sum(p.numel() for p in model.parameters())
        found["is a parameter"] = all(isinstance(p, nn.Parameter) for p in model.parameters())
        found["part"] = up.detach().to_local().norm().ndim == 0
        model.double(), model.to("cpu")
        found["kept"] = type(copy.deepcopy(up.detach())) is not torch.Tensor and model.blocks[0].up.weight is up
        optim.step()
        found["saved"] = torch.load(_saved(sw.full_tensor(up.detach())), weights_only=True).shape == (16, 8)
        found["hook"] = bool(seen)
    return found


def _saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


# ---- beside tensors that are not cut: each ends as it does in one process, or is refused -------------------------

MADE = {  # made by p.shape, which is the part's
    "add_ of eye": lambda p: p.add_(torch.eye(*p.shape)),
    "mul_ of columns": lambda p: p.mul_(torch.linspace(0.5, 1, p.shape[-1])),
    "mul_ of rows": lambda p: p.mul_(torch.linspace(0.5, 1, p.shape[0]).view(-1, 1)),
    "copy_": lambda p: p.copy_(torch.arange(p.shape[-1])),
    "of a name": lambda p: torch.Tensor.lerp_(p, end=torch.eye(*p.shape), weight=0.5),
    "masked_fill_": lambda p: p.masked_fill_(torch.eye(*p.shape) > 0, 0.0),
    "where": lambda p: p.copy_(torch.where(torch.eye(*p.shape) > 0, p, 0.0)),
    "a number beside it": lambda p: p.add_(torch.arange(p.shape[-1]) * p.detach().mul(0).add(1)),
    "the other way round": lambda p: p.copy_(torch.eye(*p.shape).mul_(p)),
    "out=": lambda p: torch.mul(p, torch.eye(*p.shape), out=p),
    "_foreach_mul_": lambda p: torch._foreach_mul_([p], [torch.eye(*p.shape)]),
    "_foreach_lerp_": lambda p: torch._foreach_lerp_([p], [p * 2], [torch.eye(*p.shape)]),
    "_foreach_copy_": lambda p: torch._foreach_copy_([p], [torch.eye(*p.shape)]),
    "data": lambda p: p.data.mul_(torch.eye(*p.shape)),
    "set data": lambda p: setattr(p, "data", torch.eye(*p.shape)),
    "set grad": lambda p: setattr(p, "grad", torch.eye(*p.shape)),
    "grad": lambda p: p.grad.mul_(torch.arange(p.shape[-1]) > 1),
    "computed": lambda p: p.sub_(p.grad * (torch.arange(p.shape[-1]) > 1)),
    "by a mask": lambda p: p.__setitem__(p > 0, torch.arange(int((sw.full_tensor(p) > 0).sum())).double()),
}  # fmt: skip

ALIKE = {  # of the parameter, its gradient, and what is along its dims one element for all ranks
    "of itself": lambda p: p.mul_(p.abs()).add_(p.grad, alpha=-0.1),
    "made like it": lambda p: p.lerp_(torch.zeros_like(p).add_(p).addcmul_(p, torch.full_like(p, 0.5)), 0.3),
    "a copy": lambda p: p.add_(torch.empty(p.shape, dtype=p.dtype).copy_(p)),
    "a number": lambda p: p.mul_(torch.tensor(0.5)).add_(torch.ones(1, 1)).sub_(torch.full((1,), 2.0)),
    "along the other dim": lambda p: p.mul_(torch.linspace(0.5, 1, p.shape[1]) if p.shape[1] == 4 else torch.linspace(0.5, 1, 4).view(-1, 1)),
    "a mask of values": lambda p: p.masked_fill_(p.abs() < 0.2, 0.0),
    "by a mask": lambda p: p.__setitem__(p > 0, torch.tensor(0.5)),
    "by a mask of rows": lambda p: p.shape[1] == 4 and p.__setitem__(p.abs().amax(1) > 0.4, torch.linspace(0, 1, 4).double()),
    "lists": lambda p: torch._foreach_lerp_([p], [p.detach().clone() * 2], torch.tensor(0.5)),
    "data": lambda p: setattr(p, "data", p.data * 2),
    "grad": lambda p: setattr(p, "grad", p.grad * (p.grad > 0)),
    "out=": lambda p: p.copy_(torch.mul(p, 2, out=torch.empty(p.shape, dtype=p.dtype))),
}  # fmt: skip


def small(hidden=6):
    """The middle of it is cut: rows of the first weight and columns of the second."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, hidden), nn.GELU(), nn.Linear(hidden, 4)).double()


def beside(layout, are_made, hidden=6):
    """By act and parameter: the error, or the parameter and its gradient after it; layout None: in one process."""
    found = {}
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
    with contextlib.nullcontext() if layout is None else sw.init(layout, device="cpu", timeout_s=30) as world:
        model = small(hidden)
        if layout is not None:
            model = sw.parallelize(model, world, example={"input": x})
        if layout is None:
            model(x).square().sum().backward()
        else:
            with sw.window(model, mine([{"x": x[:4]}, {"x": x[4:]}], world), count=lambda _: 0.5) as w:
                for batch in w:
                    (model(batch["x"]).square().sum() / w.num_tokens).backward()
        for name, act in (MADE if are_made else ALIKE).items():
            for of in ("0.weight", "2.weight"):
                param = model.get_parameter(of)
                kept = param.detach().clone(), param.grad.clone()
                try:
                    with torch.no_grad():
                        act(param)
                    whole = [x if layout is None else sw.full_tensor(x) for x in (param.detach(), param.grad)]
                    found[name, of] = [x.detach().clone() for x in whole]
                except UsageError as error:
                    found[name, of] = str(error)
                with torch.no_grad():
                    param.copy_(kept[0])
                    param.grad = kept[1]
    return found
