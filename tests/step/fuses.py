"""Steps with ``fused=True``, right ones and wrong ones."""

import warnings

import models
import torch
from models.linears import Decoder
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw

VOCAB = 4001
BATCH = (4, 12)
LOGITS = VOCAB * BATCH[0] * BATCH[1]


class Largest(TorchDispatchMode):
    """Within: the largest number of elements that an operator returns, other than of the parameters' shapes."""

    def __init__(self, shapes):
        super().__init__()
        self.numel, self._shapes = 0, set(shapes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and VOCAB // 2 <= x.shape[-1:].numel() <= VOCAB + 1:
                self.numel = max(self.numel, x.numel())
        return result


class Small(nn.Module):
    def __init__(self, vocab=VOCAB):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 8), nn.Linear(8, vocab)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


def batch(vocab=VOCAB):
    ids = torch.randint(0, vocab, BATCH, generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[0, 5:] = -100
    return {"input_ids": ids, "labels": labels}


def largest(layout):
    """The largest tensor over the vocabulary in a step with logits and without; and both losses."""
    found = []
    with sw.init(layout, device="cpu", seed=3) as world:
        for fused in (False, True):
            model = sw.parallelize(Small, world)
            step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), fused=fused)
            step([batch()])  # the first window looks at the loss once more
            with Largest(()) as seen:
                loss = step([batch()]).loss
            found.append((seen.numel, loss))
    (most, plain), (least, fused) = found
    return most, least, plain, fused


def evaluated(layout):
    """Losses with logits and without, of evaluations and of steps in half precision."""
    found = {}
    with sw.init(layout, device="cpu", seed=3) as world:
        for precision in (None, "bf16", "fp16"):
            losses = []
            for fused in (False, True):
                model = sw.parallelize(Small, world, precision=precision)
                step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), fused=fused)
                steps = [step([batch()]).loss for _ in range(3)]
                losses.append([*steps, sw.evaluate(model, [batch()], fused=fused)["loss"]])
            found[str(precision)] = tuple(losses)
    return found


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(19, 16), nn.Linear(16, 19), nn.Linear(16, 19)

    def forward(self, input_ids):
        return self.one(self.embed(input_ids))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(19, 19)

    def forward(self, input_ids):
        return self.embed(input_ids)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5


def scaled():
    model = Decoder()
    model.head = Scaled(16, 19)
    return model


def normalised():
    model = Decoder()
    nn.utils.parametrizations.weight_norm(model.head)
    return model


def patched():
    model = Decoder()
    inner = model.head.forward
    model.head.forward = lambda x: inner(x) * 0.5
    return model


class Doubles(Decoder):
    def forward(self, input_ids):
        logits = super().forward(input_ids)
        logits.data.mul_(2)
        return logits


class Clamps(Decoder):
    def forward(self, input_ids):
        logits = super().forward(input_ids)
        if logits.requires_grad:
            logits.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return logits


def gemma():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=19,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            attn_implementation="eager",
        )
    )


def frozen():
    model = Decoder()
    model.head.requires_grad_(False)
    return model


def trained(build, fused=True, other=False, **options):
    def call(world):
        model = sw.parallelize(build, world, **options)
        data = models.get("linears: kv-2").windows(1, 1)[0]
        if other:
            data = [{**data[0], "labels": data[0]["labels"][:, :3]}]
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), fused=fused)
        return step(data)

    return call


def with_another_loss(world):
    model = sw.parallelize(Decoder, world)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return sw.TrainStep(model, optim, loss=lambda output, batch: output.sum(), fused=True)


MISUSES = {
    "another loss": with_another_loss,
    "capped logits": trained(gemma),
    "an unknown name": trained(Decoder, fused="heat"),
    "two heads": trained(TwoHeads),
    "one of two heads": trained(TwoHeads, fused="two"),
    "no head": trained(Embedded),
    "a head of another class": trained(scaled),
    "a parametrised head": trained(normalised),
    "a head whose forward is another": trained(patched),
    "data of the logits": trained(Doubles),
    "a hook on the logits": trained(Clamps),
    "a compiled head": trained(Decoder, compile=sw.Compile(targets=["head"], backend="eager")),
    "other labels": trained(Decoder, other=True),
    "a frozen head": trained(frozen),
    "a named head": trained(TwoHeads, fused="one"),
}


def misused():
    found = {}
    with sw.init("dp_shard=1", device="cpu") as world:
        for name, call in MISUSES.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call(world)
                found[name] = "no error"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found
