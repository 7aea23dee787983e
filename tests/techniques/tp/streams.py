"""Small models whose sequences are cut between layers that are cut over tp, each with one thing of its own; and what ranks run of them."""

import copy
import functools
import warnings
from unittest import mock

import torch
import torch.nn.functional as F
from techniques.tp.counted import Sums
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ShardwiseError

VOCAB, WIDTH, HIDDEN = 61, 16, 28
_LENGTHS = (11, 24, 9, 17, 30, 13, 23, 8)


class Attention(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, width = how, 4 if how == "kv-1" else 8 if how == "kv-2" else WIDTH
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, width), nn.Linear(WIDTH, width)
        self.out = nn.Linear(WIDTH, WIDTH, bias=how != "no eps")
        wide = {"full-width norm": WIDTH, "norm of heads": 4}.get(how)
        self.q_norm = nn.LayerNorm(wide) if wide else None
        self.drop = nn.Dropout(0.4 if how == "dropout" else 0.0)

    def forward(self, x, mask=None):
        samples, num, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = self.q_norm(q) if self.how == "full-width norm" else q
        q, k, v = (y.view(samples, num, -1, 4).transpose(1, 2) for y in (q, k, v))
        q = self.q_norm(q) if self.how == "norm of heads" else q
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        y = self.drop(y) if self.how == "dropout" else y
        return self.drop(self.out(y.transpose(1, 2).reshape(samples, num, -1)))


class MLP(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if how == "norm inside" else nn.Identity()
        self.gate = nn.Linear(WIDTH, 1) if how == "gate inside" else None
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.3)) if how == "used both ways" else None
        self.is_late, self.others = False, []

    def forward(self, x):
        x = x * self.gain if self.how == "used both ways" else x
        for other in self.others if self.is_late else ():
            x = x * other.weight
        y = self.down(F.gelu(self.up(self.norm(x))))
        return y, (0 if self.gate is None else self.gate(x))


class Shift(nn.Module):
    """Mixes positions: each token with the one before it."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.full((WIDTH,), 0.3))

    def forward(self, x):
        return x + self.mix * F.pad(x, (0, 0, 1, -1))


class Counted(nn.Module):
    """Counts the tokens that it has seen, and goes by their number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += x.shape[0] * x.shape[1]
        return x * 1.1


class _Attached(torch.autograd.Function):
    """Adds a loss to that of the model."""

    @staticmethod
    def forward(ctx, x, loss):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=grad.dtype)


class _Normed(torch.autograd.Function):
    """Gives a gradient of one length."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / (1e-3 + grad.norm())


class _RowNormed(torch.autograd.Function):
    """Gives each token a gradient of one length."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / (1e-3 + grad.norm(dim=-1, keepdim=True))


class _Scaled(torch.autograd.Function):
    """``x * weight``, as a kernel with a backward of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class _Averaged(_Scaled):
    """Gives its weight the mean over positions."""

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0) * 13 / x.shape[-2]


class _Divided(torch.autograd.Function):
    """A weight, whose gradient is divided by the length."""

    @staticmethod
    def forward(ctx, weight, num):
        ctx.num = num
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.num, None


def _of_one_length(grads):
    return tuple(None if grad is None else grad / (1e-3 + grad.norm()) for grad in grads)


def _packed(x):
    most = x.abs().max()
    return (x / most * 127).round(), most


def _unpacked(kept):
    return kept[0] / 127 * kept[1]


attached, normed, scaled, averaged = _Attached.apply, _Normed.apply, _Scaled.apply, _Averaged.apply


@torch.library.custom_op("shardwise_tests::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("shardwise_tests::limited", mutates_args=())
def limited(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("shardwise_tests::gained", mutates_args=())
def gained(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


def _of_weight(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad * weight, (grad * x).flatten(0, -2).sum(0)


copied.register_fake(torch.empty_like)
copied.register_autograd(lambda ctx, grad: grad / (1e-3 + grad.norm()))
limited.register_fake(torch.empty_like)
limited.register_autograd(lambda ctx, grad: grad if grad.norm() < 1e3 else grad / grad.norm())
gained.register_fake(lambda x, weight: torch.empty_like(x))
gained.register_autograd(_of_weight, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def _product(x, weight):
    return x * weight


with warnings.catch_warnings(action="ignore"):  # torch says that it is old; models have it
    scripted = torch.jit.script(_product)


class OwnGradients(nn.Module):
    """Has a backward of its own."""

    def __init__(self, how, width=WIDTH):
        super().__init__()
        self.how, self.gain = how, nn.Parameter(torch.full((width,), 1.1))

    def forward(self, x):
        if self.how == "loss of a mean":
            return attached(x, 3 * (x * self.gain).square().mean())
        if self.how == "loss of a sum":
            return attached(x, 0.01 * (x * self.gain).square().sum())
        if self.how == "gradient of one length":
            return normed(x) * self.gain
        if self.how == "hook":
            if x.requires_grad:
                x.register_hook(lambda grad: grad / (1e-3 + grad.norm()))
            return x * self.gain
        if self.how == "hook of a threshold":
            if x.requires_grad:
                x.register_hook(lambda grad: grad if grad.norm() < 1e3 else grad / grad.norm())
            return x * self.gain
        if self.how == "hook of rows":
            if x.requires_grad:
                x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            return x * self.gain
        if self.how == "weight by the length":
            return x * _Divided.apply(self.gain, x.shape[1])
        if self.how in ("hook of a node", "hook before a node"):
            y = x * self.gain
            if y.grad_fn is not None and self.how == "hook of a node":
                y.grad_fn.register_hook(lambda grads, _: _of_one_length(grads))
            if y.grad_fn is not None and self.how == "hook before a node":
                y.grad_fn.register_prehook(_of_one_length)
            return y
        if self.how == "packed for backward":
            with torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
                return F.gelu(x) * self.gain
        if self.how == "kept on the CPU":
            with torch.autograd.graph.save_on_cpu():
                return F.gelu(x) * self.gain
        if self.how == "checkpoint":
            return checkpoint(lambda x: F.gelu(x) * self.gain, x, use_reentrant=False)
        if self.how == "operator of one length":
            return copied(x) * self.gain
        if self.how == "operator of a threshold":
            return limited(x) * self.gain
        if self.how == "operator of rows":
            return gained(x, self.gain)
        if self.how == "mean for a weight":
            return averaged(x, self.gain)
        if self.how == "script":
            return scripted(x, self.gain)
        if self.how == "straight through":  # the values are those of x
            mean = (x * self.gain).mean(1, keepdim=True)
            return x + (mean - mean.detach())
        if self.how == "stopped by the length":
            share = 1 / x.shape[1]
            return (x * share + x.detach() * (1 - share)) * self.gain
        if self.how == "norm of a gradient":  # each token's, with a backward that is no sum
            return _RowNormed.apply(x) * self.gain
        if self.how == "vmap":
            return torch.vmap(lambda row: row * self.gain)(x)
        if self.how == "views":
            y = torch.zeros(x.shape, dtype=x.dtype)
            y[..., :8].copy_(x[..., :8])
            y[..., 8:].copy_(x[..., 8:])
            return y * self.gain
        return scaled(x, self.gain)


WHOLE = (
    "loss of a mean",
    "loss of a sum",
    "gradient of one length",
    "hook",
    "vmap",
    "mean for a weight",
    "operator of one length",
    "weight by the length",
    "hook of a node",
    "hook before a node",
    "packed for backward",
    "hook of a threshold",
    "operator of a threshold",
    "straight through",
    "stopped by the length",
)
BY_ROWS = (
    "norm of a gradient",
    "kernel of rows",
    "hook of rows",
    "script",
    "views",
    "operator of rows",
    "kept on the CPU",
    "checkpoint",
)


class Block(nn.Module):
    writes = False

    def __init__(self, how):
        super().__init__()
        self.how, self.norm, self.attention = how, nn.LayerNorm(WIDTH), Attention(how)
        self.norm2, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.tensor(1.2))
        if how in ("inline", "in place"):
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        else:
            self.mlp = MLP(how)
        if how == "late in a region":
            self.mlp.others = [self.norm]
        if how == "tied norms":
            self.norm2.weight = self.norm.weight
        self.mixes = {"shift": Shift, "counts": Counted}.get(how, nn.Identity)()
        if how in {*WHOLE, *BY_ROWS}:
            self.mixes = OwnGradients(how)
        self.own = nn.Parameter(torch.full((WIDTH,), 1.1)) if how in ("late", "statistics") else None
        if how == "statistics":
            self.register_buffer("running", torch.zeros(WIDTH))
        if how == "batch norm":
            self.mixes = nn.BatchNorm1d(WIDTH)
        self.table = nn.Parameter(torch.full((WIDTH,), 0.7)) if how == "condition" else None
        if how == "in place":
            self.gate = nn.Linear(WIDTH, HIDDEN)
            for layer in (self.up, self.gate):
                layer.requires_grad_(False)  # one that is trained keeps its input, which may not be changed
        if how == "frozen norm":
            self.norm.requires_grad_(False)

    def forward(self, x, mask=None, condition=None):
        h = self.norm(x)
        if condition is not None:
            h = h * (1 + (self.table * condition)[:, None] if self.how == "condition" else condition)
        h = self.mixes(h.flatten(0, 1)).view_as(h) if self.how == "batch norm" else self.mixes(h)
        if self.how == "late" and self.is_long:
            h = h * self.own
        if self.how == "statistics":
            with torch.no_grad():
                self.running.lerp_(h.mean((0, 1)), 0.1)
        y = self.attention(h, mask)
        if self.how == "no eps":
            y = y / y.norm(dim=-1, keepdim=True)
        x = x + self.scale * y
        h = self.norm2(x)
        if self.how == "in place":
            y = self.up(h)
            if self.writes:
                h.mul_(1.3)
            return x + self.down(F.silu(y) * self.gate(h))
        if self.how == "inline":
            return x + self.down(F.gelu(self.up(h)))
        if self.how == "late in a region":
            self.mlp.is_late = self.is_long
        y, more = self.mlp(h)
        x = x + y + more
        if self.how == "used both ways":
            x = x * self.mlp.gain
        return {"hidden": (x, None)} if self.how == "tuple" else x


class Words(nn.Module):
    def __init__(self, how=""):
        super().__init__()
        self.how = how
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.of_samples = nn.Parameter(torch.full((WIDTH,), 0.7)) if how == "condition" else None
        if how == "tied":
            self.head.weight = self.tokens.weight
        if how == "norm of the root":
            self.norm.weight = self.blocks[1].norm2.weight
        self.biases = nn.Embedding(5, WIDTH // 4) if how == "distances" else None  # of heads, by the distance

    def forward(self, input_ids, leave_out=False):
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        start, other, options = x, 0.5 * x, {}
        if self.how == "mask":
            num = input_ids.shape[1]
            options["mask"] = torch.ones(num, num, dtype=torch.bool).tril().tril_()[None, None]
        if self.how == "condition":
            options["condition"] = F.silu(self.of_samples * x[:, 0])
        for i, block in enumerate(self.blocks):
            block.is_long = input_ids.shape[1] > 26
            if self.how == "distances":
                at = torch.arange(input_ids.shape[1], device=input_ids.device)
                options["mask"] = self.biases((at - at[:, None]).clamp(-2, 2) + 2).permute(2, 0, 1)[None]
            if self.how == "root between":
                x = 0.9 * x + 0.1 * start
            if self.how == "first output" and i:
                options["condition"] = start.tanh()
            if self.how == "leaves out" and self.training and i == 1 and input_ids.shape[1] == 9:
                continue
            x = block(x=x, **options) if self.how == "keyword" else block(x, **options)
            x = x["hidden"][0] if self.how == "tuple" else x
            x = block(x) if self.how == "block twice" else x
            other = block(other) if self.how == "two streams" else other
        if self.how == "list twice":
            for block in self.blocks:
                x = block(x)
        x = self.norm(x + other if self.how == "two streams" else x)
        if self.how == "late behind the blocks" and block.is_long:
            x = x * self.blocks[1].norm2.weight
        if self.how == "pooled":
            x = x + x.mean(1, keepdim=True)
        y = self.head(x)
        return {"logits": y, "hidden": x} if self.how == "dictionary" else y


class Pairs(Words):
    """Has blocks of sequences of two lengths."""

    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList(Block("") for _ in range(2))

    def forward(self, ids, others):
        x, y = self.tokens(ids), self.tokens(others)
        for block in self.blocks:
            x = block(x)
        for block in self.others:
            y = block(y)
        return self.head(x + y.mean(1, keepdim=True))

    @staticmethod
    def of_two_lengths(model, given):
        return model(given["input_ids"], given["input_ids"][:, :8])


class Halved(Words):
    """Its blocks have every second position, of all samples beside each other: no argument of theirs is as long as the model's."""

    def forward(self, input_ids):
        x = self.tokens(input_ids)[:, ::2].flatten(0, 1)[None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clip:
    """Builds two towers, one of tokens and one of patches, which are compared."""

    def __call__(self):
        import transformers

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        text = {**sizes, "vocab_size": VOCAB, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2}
        image = {**sizes, "image_size": 16, "patch_size": 8}
        config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
        torch.manual_seed(0)
        model = transformers.CLIPModel(config).double()
        for name, param in model.named_parameters():
            param.requires_grad_(not name.endswith("k_proj.bias"))  # whose gradient is 0 but for rounding
        return model

    @staticmethod
    def windows():
        """Micro-batches of 9 to 13 tokens beside an image."""
        draw = torch.Generator().manual_seed(0)

        def pair(num):
            ids = torch.randint(3, VOCAB, (2, num), generator=draw)
            ids[:, -1] = 2
            pixels = torch.randn(2, 3, 16, 16, generator=draw, dtype=torch.float64)
            return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}

        return [[pair(9), pair(13)], [pair(12), pair(11)]]

    @staticmethod
    def loss(output, given):
        near = (output["text_embeds"] * output["image_embeds"]).sum(-1)
        return (1 - near).square().sum() + output["text_model_output"]["last_hidden_state"].square().mean(
            -1
        ).sum() * 0.1

    @staticmethod
    def count(given):
        return torch.tensor(len(given["input_ids"]))


EXACT = (
    *("", "kv-1", "kv-2", "full-width norm", "norm of heads", "inline", "keyword", "tuple", "dictionary", "tied", "tied norms"),
    *("frozen norm", "norm inside", "gate inside", "used both ways", "norm of the root", "mask", "condition", "first output"),
    *("root between", "block twice", "list twice", "pooled", "shift", "batch norm", "counts"),
    *("two streams", "no eps", "distances"),
)  # fmt: skip
"""What makes each model another."""


def build(how, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    model = Words(how).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            scale = 0.3 if param.dim() > 1 else 0.1
            param.add_(scale * torch.randn(param.shape, generator=generator, dtype=dtype))
    return model


class Build:
    """Builds a model on a rank."""

    def __init__(self, how):
        self.how = how

    def __call__(self):
        return build(self.how)


def batch(seed, num):
    """Tokens, with as many labels as the seed says."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (2, num), generator=generator)
    labels = ids.roll(-1, 1)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[1, -1] = 5  # one counts
    return {"input_ids": ids, "labels": labels}


def windows(steps=2, micro=2):
    """Micro-batches of other lengths, some of which no number of ranks divides."""
    return [[batch(10 * s + i, _LENGTHS[(s * micro + i) % 8]) for i in range(micro)] for s in range(steps)]


def loss_of(output, given):
    logits = output["logits"] if isinstance(output, dict) else output
    return F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), ignore_index=-100, reduction="sum")


def count(given):
    return (given["labels"] != -100).sum()


PARALLEL = sw.TensorParallel(sequence_parallel=True)


def parallel(how, world, dtype=torch.float64, **options):
    example = {"input_ids": batch(1, 24)["input_ids"]}
    return sw.parallelize(build(how, dtype), world, example=example, tensor_parallel=PARALLEL, **options)


def trained(model):
    return sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss_of, count=count)


def largest_error(found, expected):
    return max(float((found[key] - value).abs().max() / value.abs().max()) for key, value in expected.items())


# ---- what ranks run --------------------------------------------------------------------------------------------------


def every_length(how, layout, lengths, **options):
    """The largest error of losses and parameters, of one micro-batch of each length in turn, next to one process."""
    plain = build(how)
    reference, worst = torch.optim.SGD(plain.parameters(), lr=0.05), 0.0
    with sw.init(layout, device="cpu") as world:
        model = parallel(how, world, **options)
        step = trained(model)
        for block in (*model.blocks, *plain.blocks):
            block.writes = True  # in its stream, which it did not on the example
        for num in lengths:
            given = batch(num, num)
            loss = loss_of(plain(given["input_ids"]), given) / int(count(given))
            loss.backward()
            reference.step()
            reference.zero_grad()
            worst = max(worst, abs(float(step([given]).loss) - float(loss)) / float(loss))
            state = sw.full_state_dict(model)
            if world.is_main:
                worst = max(worst, largest_error(state, dict(plain.named_parameters())))
    return worst


def penalty(model):
    return 0.1 * sum(block.norm.weight.square().sum() for block in model.blocks)


def own_loop(how, layout):
    """The largest error of parameters after two windows of a loop of one's own; of an answer; and of an evaluation."""
    plain = build(how)
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    with sw.init(layout, device="cpu") as world:
        model = parallel(how, world)
        optim = torch.optim.SGD(model.parameters(), lr=0.05)
        for micro in windows():
            total = sum(int(count(given)) for given in micro)
            for given in micro:
                (loss_of(plain(given["input_ids"]), given) / total).backward()
            penalty(plain).backward()
            reference.step()
            reference.zero_grad()
            with sw.window(model, micro) as window:
                for given in window:
                    (loss_of(model(given["input_ids"]), given) / window.num_tokens).backward()
                sw.parameter_penalty(model, penalty(model))
            optim.step()
            optim.zero_grad()
        state, given = sw.full_state_dict(model), batch(3, 13)
        error = largest_error(state, dict(plain.named_parameters())) if world.is_main else 0.0
        with torch.no_grad():
            expected = plain(given["input_ids"])
            answer = float((model(given["input_ids"]) - expected).abs().max())
        found = sw.evaluate(model, [given], loss=loss_of, count=count)
        return error, answer, abs(found["loss"] - float(loss_of(expected, given)) / int(count(given)))


def counted(how, layout, **options):
    """The exchanges of a window of two micro-batches of 13 positions, forward and backward, by kind and shape."""
    found = []

    class Exchanges(Sums):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "_c10d_functional" and "wait" not in str(func):
                found.append((str(func).split(".")[1], tuple(args[0].shape)))
            return super().__torch_dispatch__(func, types, args, kwargs)

    with sw.init(layout, device="cpu") as world:
        step = trained(parallel(how, world, torch.float32, **options))
        step([batch(1, 13)])
        with Exchanges():
            step([batch(2, 13), batch(3, 13)])
        return found


def kept_between(layout):
    """Bytes that the blocks keep for backward of what is between regions: norms, and their inputs."""
    with sw.init(layout, device="cpu") as world:
        model = parallel("", world) if world.size > 1 else build("")
        kept = {}

        def note(x):
            if x.dim() == 3 and x.shape[-1] in (WIDTH, 1):
                kept[x.untyped_storage().data_ptr()] = x, x.numel() * x.element_size()
            return x

        def watching(module):
            inner = module.forward

            def forward(*args):
                with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                    return inner(*args)

            module.forward = forward

        for block in model.blocks:
            watching(block.norm)
            watching(block.norm2)
        given = batch(1, 24)
        if world.size > 1:
            trained(model)([given])
        else:
            loss_of(model(given["input_ids"]), given).backward()
        return sum(size for _, size in kept.values())


def dropped(layout, **options):
    """The shape of what was dropped in each call, and where; a number drawn behind the blocks; and what was trained."""
    found = []
    with sw.init(layout, device="cpu") as world:
        model = parallel("dropout", world, **options)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(
                    lambda _, args, y: found.append((tuple(y.shape), ((y == 0) & (args[0] != 0)).flatten().tolist()))
                )
        drawn = []
        model.norm.register_forward_hook(lambda *_: drawn.append(float(torch.rand(()))))
        step = trained(model)
        for num in (12, 12):
            step([batch(1, num)])
        return found, drawn, [sw.full_tensor(param).tolist() for param in model.parameters()]


class Drops(Block):
    """Drops rows while its code has what was joined; channels of samples; channels of rows; and, if told to, more than on the example."""

    def __init__(self):
        super().__init__("inline")
        self.rows, self.samples, self.channels, self.drops_more = (
            nn.Dropout(0.1),
            nn.Dropout(0.4),
            nn.Dropout1d(0.4),
            False,
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        h = self.up(self.norm2(x))
        x = self.rows(x)
        y = self.down(F.gelu(h)) * self.samples(torch.ones(len(x), 1, WIDTH, dtype=x.dtype))
        x = self.channels(x.mT).mT + y
        return F.dropout(x, 0.1) if self.drops_more else x


class DropsBetween(Words):
    """Drops in the root's code between blocks too."""

    def __init__(self):
        super().__init__()
        self.blocks, self.rows = nn.ModuleList(Drops() for _ in range(2)), nn.Dropout(0.1)

    def forward(self, input_ids):
        x = self.blocks[0](self.tokens(input_ids))
        return self.head(self.norm(self.blocks[1](self.rows(x))))


def dropped_otherwise(layout, **options):
    """The kind of each dropout, and where it dropped; a number that is drawn behind the blocks; and what was trained."""
    found, drawn = [], []
    with sw.init(layout, device="cpu") as world:
        example = {"input_ids": batch(1, 24)["input_ids"]}
        model = sw.parallelize(DropsBetween().double(), world, example=example, tensor_parallel=PARALLEL, **options)

        def note(kind, _, args, y):
            is_out = (y == 0) & (args[0] != 0)
            found.append((kind, (is_out.any(-1) if kind == "channels" else is_out).flatten().tolist()))

        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout | nn.Dropout1d) and module.p:
                module.register_forward_hook(functools.partial(note, name.rpartition(".")[2]))
        model.norm.register_forward_hook(lambda *_: drawn.append(float(torch.rand(()))))
        step = trained(model)
        for num in (12, 13, 12):
            step([batch(1, num)])
        return found, drawn, [sw.full_tensor(param).tolist() for param in model.parameters()]


def buffers_of(how, layout):
    with sw.init(layout, device="cpu") as world:
        model = parallel(how, world)
        trained(model)([batch(1, 13), batch(2, 9)])
        return {name: x.clone() for name, x in model.named_buffers()}


def plain_buffers(how):
    model = copy.deepcopy(build(how))
    for given in (batch(1, 13), batch(2, 9)):
        model(given["input_ids"])
    return dict(model.named_buffers())


def refused(case):
    """The error that a use ends in."""
    with sw.init("tp=2", device="cpu") as world:
        try:
            _use(case, world)
        except ShardwiseError as error:
            return str(error)
        return "nothing was raised"


def _use(case, world):
    if case == "late, in a graph that is not seen":
        with mock.patch("shardwise.techniques.tp.whole_uses.WholeUses.share"):
            return _use("late", world)
    if case == "compiled dropout":
        parallel("dropout", world, compile=sw.Compile(backend="aot_eager"))
    if case == "no blocks":
        sw.parallelize(MLP(""), world, example={"x": torch.randn(2, 9, WIDTH)}, tensor_parallel=PARALLEL)
    if case == "halved":
        ids = batch(1, 21)["input_ids"]  # a length that is not by chance that of its blocks
        sw.parallelize(Halved().double(), world, example={"input_ids": ids}, tensor_parallel=PARALLEL)
    if case == "nothing cut":
        model = build("")
        model.blocks = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        ids = batch(1, 24)["input_ids"]
        sw.parallelize(model.double(), world, example={"input_ids": ids}, tensor_parallel=PARALLEL)
    if case == "late":
        step = trained(parallel(case, world))
        for num in (9, 13, 30):
            step([batch(1, num)])
    if case == "statistics":
        parallel("statistics", world)
    if case == "two lengths":
        ids = batch(1, 24)["input_ids"]
        model = sw.parallelize(Pairs().double(), world, example={"ids": ids, "others": ids}, tensor_parallel=PARALLEL)
        step = sw.TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss_of, count=count, forward=Pairs.of_two_lengths
        )
        step([batch(1, 13)])
    if case == "left out":
        model = parallel("leaves out", world)
        trained(model)([batch(1, 9)])
    if case == "another drop":
        ids = batch(1, 24)["input_ids"]
        model = sw.parallelize(DropsBetween().double(), world, example={"input_ids": ids}, tensor_parallel=PARALLEL)
        model.blocks[1].drops_more = True
        trained(model)([batch(1, 9)])
    if case == "another flag":
        model = parallel("", world)
        forward = lambda m, b: m(b["input_ids"], leave_out=True)  # noqa: E731
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        sw.TrainStep(model, optim, loss=loss_of, count=count, forward=forward)([batch(1, 9)])
