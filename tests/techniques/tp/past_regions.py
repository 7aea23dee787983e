"""Uses of parameters that every rank has whole, and of whose gradient it has a part, outside of the regions that are cut; and what ranks run of them."""

import torch
import torch.nn.functional as F
from techniques.tp.searches import searched_once
from techniques.tp.streams import batch, count, largest_error, loss_of
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError

VOCAB, WIDTH, HEAD = 61, 16, 4


def attended(q, k, v):
    scores = q @ k.mT / HEAD**0.5
    return (scores + torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype).triu(1)).softmax(-1) @ v


class Attention(nn.Module):
    """As Qwen3's: a norm of each head of q and of k; and a temperature."""

    def __init__(self, num_kv=4):
        super().__init__()
        width = num_kv * HEAD
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, width), nn.Linear(WIDTH, width)
        self.out, self.q_norm, self.k_norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        self.temperature, self.shift = nn.Parameter(torch.tensor(1.2)), nn.Parameter(torch.linspace(0.1, 0.4, HEAD))
        self.kept = None

    def forward(self, x):
        samples, num, _ = x.shape
        q, k, v = (y.view(samples, num, -1, HEAD).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        weight = self.k_norm.weight.exp()
        if self.kept is not None:
            self.kept.append(weight)
        q, k = self.q_norm(q) * self.temperature, self.k_norm(k) * weight + self.shift
        y = attended(q, k, v)
        return self.out(y.transpose(1, 2).reshape(samples, num, -1))


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
        self.is_late = False

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * (1 + l2(self) if self.is_late else 1))

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
    return model.double()


# ---- uses ------------------------------------------------------------------------------------------------------------


def norms(model):
    return [p for block in model.blocks for p in (block.attention.q_norm.weight, block.attention.k_norm.weight)]


def l2(model):
    return 0.1 * sum(p.square().sum() for p in norms(model))


def of_a_view(model):
    return sum(p.view(2, 2)[1].mul(3).abs().sum() + p[0].norm() for p in norms(model))


def of_several(model):
    return (norms(model)[0] * model.norm.weight[:HEAD] * norms(model)[3]).sum() + norms(model)[1].log().sum()


def determinant(model):
    return torch.stack(norms(model)).add(torch.eye(HEAD, dtype=torch.float64)).logdet() + torch.stack(norms(model)).norm()


def of_numbers(model):
    return model.attention.temperature ** 3 + model.attention.shift.exp().sum()


def gradient_of_it(model):
    (grad,) = torch.autograd.grad(l2(model), norms(model)[:1], create_graph=True)
    return grad.square().sum()


def gradient_of_the_loss(model, given, output):
    """Of the embeddings' output; differentiated again."""
    (grad,) = torch.autograd.grad(loss_of(output, given), model.kept, create_graph=True)
    return 0.01 * grad.square().sum() + l2(model)


def called(model, given, output):
    """The module is called by the loss."""
    return model.attention.q_norm(output[..., :HEAD]).square().mean()


def shared(model, given, output):
    """What the region has computed from it, once more."""
    return sum(kept.square().sum() for kept in model.attention.kept)


def late(model, given, output):
    """In the model's own forward, which on the example it was not."""
    return 0.0


def hooked(model, given, output):
    """Left by a hook on the model."""
    return model.kept


USES = {
    use.__name__: use
    for use in (l2, of_a_view, of_several, determinant, of_numbers, gradient_of_it, gradient_of_the_loss, called, shared, late, hooked)
}


def term(use, model, given, output):
    return count(given) * (use(model) if use.__code__.co_argcount == 1 else use(model, given, output))


def prepared(use, model):
    if use is gradient_of_the_loss:
        model.tokens.register_forward_hook(lambda *args: setattr(model, "kept", args[-1]))
    if use is shared:
        model.attention.register_forward_pre_hook(lambda module, _: setattr(module, "kept", []))
    if use is late:
        model.is_late = True
    if use is hooked:
        model.register_forward_hook(lambda module, *_: setattr(module, "kept", l2(module)))


def trained(how, layout, sequence=False, steps=2, micro=2, **options):
    """What is said, or the largest error of losses and parameters after some steps, next to one process."""
    use, plain = USES[how], build()
    prepared(use, plain)
    reference, worst = torch.optim.SGD(plain.parameters(), lr=0.05), 0.0
    with sw.init(layout, device="cpu", timeout_s=60, seed=0) as world:
        example = {"input_ids": batch(1, 24)["input_ids"]}
        with searched_once(build):
            model = sw.parallelize(
                build(), world, example=example, tensor_parallel=sw.TensorParallel(sequence_parallel=sequence), **options
            )
        prepared(use, model)
        optim = torch.optim.SGD(model.parameters(), lr=0.05)
        loss = lambda output, given: loss_of(output, given) + term(use, model, given, output)
        step = sw.TrainStep(model, optim, loss=loss, count=count)
        for number in range(steps):
            window = [batch(10 * number + i, 9 + 4 * i) for i in range(micro)]
            total, of_all = sum(int(count(given)) for given in window), 0.0
            for given in window:
                output = plain(given["input_ids"])
                part = (loss_of(output, given) + term(use, plain, given, output)) / total
                part.backward()
                of_all += part.item()
            reference.step()
            reference.zero_grad()
            try:
                found = float(step(window).loss)
            except ShardwiseError as error:
                return str(error)
            state = sw.full_state_dict(model)
            worst = max(worst, abs(found - of_all) / of_all)
            if world.is_main:
                worst = max(worst, largest_error(state, dict(plain.named_parameters())))
    return worst
