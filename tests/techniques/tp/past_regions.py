"""Uses of parameters past the layers that are cut over tp, such as a penalty in the loss on the norm of each head; and what ranks run of them."""

import torch
import torch.nn.functional as F
from techniques.tp.searches import searched_once
from techniques.tp.streams import batch, count, largest_error, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ShardwiseError

VOCAB, WIDTH, HEAD = 61, 16, 4


def attended(q, k, v):
    scores = q @ k.mT / HEAD**0.5
    return (scores + torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype).triu(1)).softmax(-1) @ v


class Attention(nn.Module):
    """As Qwen3's: a norm of each head of q and of k; and a temperature."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.q_norm, self.k_norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        self.temperature, self.shift = nn.Parameter(torch.tensor(1.2)), nn.Parameter(torch.linspace(0.1, 0.4, HEAD))
        self.gain, self.kept, self.is_late = nn.Parameter(torch.tensor(0.9)), None, False

    def forward(self, x):
        samples, num, _ = x.shape
        q, k, v = (y.view(samples, num, -1, HEAD).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        weight = self.k_norm.weight.exp()
        if self.kept is not None:
            self.kept += [weight, q, k]
        if self.is_late:
            v = v * self.gain
        q, k = self.q_norm(q) * self.temperature + self.shift, self.k_norm(k) * weight
        y = attended(q, k, v)
        return self.gain * self.out(y.transpose(1, 2).reshape(samples, num, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 28), nn.Linear(28, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.late = None

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * (1 if self.late is None else 1 + self.late(self)))

    @property
    def attention(self):
        return self.blocks[1].attention


def build():
    torch.manual_seed(0)
    model = Words()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "attention" in name and "_norm" in name:
                param.copy_(torch.rand(HEAD) + 0.5)
    model.attention.q.requires_grad_(False)
    return model.double()


# ---- uses: what is added to the loss of a micro-batch ------------------------------------------------------------------


def norms(model):
    return [p for block in model.blocks for p in (block.attention.q_norm.weight, block.attention.k_norm.weight)]


def l2(model):
    return 0.1 * sum(p.square().sum() for p in norms(model))


class _Cubed(torch.autograd.Function):
    """A function of the user's own, whose first argument is no tensor."""

    @staticmethod
    def forward(ctx, factor, other, x):
        ctx.save_for_backward(other, x)
        ctx.factor = factor
        return factor * (other + x.pow(3)).sum()

    @staticmethod
    def backward(ctx, grad):
        other, x = ctx.saved_tensors
        return None, ctx.factor * grad * torch.ones_like(other), 3 * ctx.factor * grad * x.square()


USES = {
    "l2": lambda model, _: l2(model),
    "l1 of views": lambda model, _: sum(p.view(2, 2)[1].mul(3).abs().sum() + p[0] for p in norms(model)),
    "norms": lambda model, _: torch.stack(norms(model)).norm() + norms(model)[1].norm(p=3),
    "determinant": lambda model, _: (torch.stack(norms(model)) + torch.eye(HEAD, dtype=torch.float64)).logdet(),
    "several": lambda model, _: (norms(model)[0] * model.norm.weight[:HEAD] * norms(model)[3]).log().sum(),
    "numbers": lambda model, _: model.attention.temperature**3 + model.attention.shift.exp().sum(),
    "own function": lambda model, _: _Cubed.apply(0.3, *norms(model)[1:3]),
    "twice": lambda model, _: (
        torch.dot(norms(model)[0], norms(model)[0]) + norms(model)[0].outer(norms(model)[0]).sum()
    ),
    "called by the loss": lambda model, x: model.attention.q_norm(x[..., :HEAD]).square().mean(),
    "with a gradient of the loss": lambda model, x: (
        l2(model) + 1e-3 * gradient(x.logsumexp(-1).sum(), model.seen).square().sum()
    ),
    "of rows": lambda model, _: sum(b.norm.weight.square().sum() + b.down.bias.abs().sum() for b in model.blocks),
    "in its forward": lambda model, x: x[:, -1].square().mean(),
    "left by a hook": lambda model, _: model.left,
    "of two backwards": lambda model, _: l2(model),
    "of some inputs": lambda model, _: l2(model),
    "what the layers have computed of it": lambda model, _: model.attention.kept[-3].square().sum(),
    "heads of a rank": lambda model, _: model.attention.kept[-1].square().mean(),
    "heads of a rank, not trained": lambda model, _: model.attention.kept[-2].square().mean(),
    "between the layers": lambda model, x: x.square().mean(),
    "a parameter itself": lambda model, _: 0.0,
    "in a reentrant checkpoint": lambda model, x: checkpoint(lambda y: y.mean() * l2(model), x, use_reentrant=True),
    "a part, in its forward": lambda model, x: x.square().mean(),
}


def gradient(y, x):
    return torch.autograd.grad(y, x, create_graph=True)[0]


def flags(model, how):
    model.late = {
        "in its forward": l2,
        "a part, in its forward": lambda m: m.blocks[0].up.weight.detach().mean() * m.blocks[0].up.bias.sum(),
    }.get(how)
    model.attention.kept = [] if how.startswith(("what the layers have computed of it", "heads of a rank")) else None
    model.attention.is_late = how == "between the layers"


def hooked(model):
    model.tokens.register_forward_hook(lambda *args: setattr(model, "seen", args[-1]))
    model.register_forward_hook(lambda model, *_: setattr(model, "left", l2(model)))
    return model


def backward(how, model, given, total):
    """Of a micro-batch."""
    output = model(given["input_ids"])
    loss = (loss_of(output, given) + count(given) * USES[how](model, output)) / total
    if how == "of two backwards":
        loss.backward(retain_graph=True)
    if how == "a parameter itself":
        torch.autograd.backward([loss, model.attention.temperature])
    else:
        loss.backward(inputs=[*norms(model)[:3], model.tokens.weight] if how == "of some inputs" else None)


def gradients_off(layout, sequence, hows, **options):
    """For each use the largest error of the gradients of a window of two micro-batches next to one process, or what is said."""
    found, plain, micro = {}, hooked(build()), [batch(1, 9), batch(2, 13)]
    total = sum(int(count(given)) for given in micro)
    with sw.init(layout, device="cpu", timeout_s=60, seed=0) as world:
        parallel = sw.TensorParallel(sequence_parallel=sequence)
        example = {"input_ids": batch(1, 24)["input_ids"]}
        with searched_once(build):
            model = hooked(sw.parallelize(build(), world, example=example, tensor_parallel=parallel, **options))
        for how in hows:
            for each in (plain, model):
                flags(each, how)
                each.zero_grad()
            for given in micro:
                backward(how, plain, given, total)
            try:
                with sw.window(model, micro) as window:
                    for given in window:
                        backward(how, model, given, window.num_tokens)
                grads = {
                    name: p.grad if p.grad is None else sw.full_tensor(p.grad) for name, p in model.named_parameters()
                }
                found[how] = off(grads, plain)
            except ShardwiseError as error:
                found[how] = str(error)
    return found


def off(grads, plain):
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert {n for n, x in expected.items() if x is None} == {n for n, x in grads.items() if x is None}
    return largest_error(grads, {name: x for name, x in expected.items() if x is not None and bool(x.any())})


# ---- without gradients: losses and entries of them, of what another way through the code returns ------------------------


def _heads(model, given):
    """What lies between cut layers: this rank's heads of k."""
    return model.attention.k(model.tokens(given["input_ids"]))


def _features(model, given):
    """What lies between blocks, whole on every rank."""
    return model.blocks[1](model.tokens(given["input_ids"]))


FORWARDS = {"forward": lambda model, given: model(given["input_ids"]), "features": _features, "heads": _heads}


def _mean_square(output, given):
    return output.double().square().mean() * count(given)


def _with_entry(output, given):
    return {"loss": loss_of(output[0], given), "square": _mean_square(output[1], given)}


def losses(layout, sequence):
    """Each evaluation's loss, and those of a step with an entry that has no gradient; or what is said; and those of one process."""
    batches = [batch(1, 9), batch(2, 13)]

    def evaluated(model, forward):
        return sw.evaluate(model, batches, loss=_mean_square, count=count, forward=forward)["loss"]

    def stepped(model, other):
        def forward(model, given):
            output = model(given["input_ids"])
            with torch.no_grad():
                return output, other(model, given)

        optim = torch.optim.SGD(model.parameters(), lr=0.0)
        step = sw.TrainStep(model, optim, loss=_with_entry, count=count, forward=forward)
        return step(batches).metrics["square"]

    plain, found = build(), {}
    total = sum(float(count(given)) for given in batches)
    with sw.init(layout, device="cpu", timeout_s=60, seed=0) as world:
        parallel = sw.TensorParallel(sequence_parallel=sequence)
        example = {"input_ids": batch(1, 24)["input_ids"]}
        model = sw.parallelize(build(), world, example=example, tensor_parallel=parallel)
        for name, forward in FORWARDS.items():
            with torch.no_grad():
                alone = sum(float(_mean_square(forward(plain, given), given)) for given in batches) / total
            for what, run in (("evaluated", evaluated), ("stepped", stepped)):
                try:
                    found[what, name] = alone, run(model, forward)
                except ShardwiseError as error:
                    found[what, name] = alone, str(error)
    return found
