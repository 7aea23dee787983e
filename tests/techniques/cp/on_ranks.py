"""What ranks run for the tests of context parallelism."""

import copy
import gc

import torch
import torch.nn.functional as F
from techniques.cp.sequences import VOCAB, WIDTH, Attention, Block, Words, batch, build, count, heads, loss_of, windows
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw


def parallel(name, world, **options):
    example = {key: value for key, value in batch(1, 24, name).items() if key != "labels"}
    return sw.parallelize(build(name), world, example=example, **options)


def largest_error(found, expected) -> float:
    return max(float((found[key] - value).abs().max() / value.abs().max()) for key, value in expected.items())


def _arrange(*_):
    torch.arange(7).view(7, 1) @ torch.ones(1, 1).long()


def every_length(name, layout, lengths, *, observer=None, **options):
    """The largest error of losses and parameters, of one micro-batch of each length in turn, next to one process. ``observer``: a hook on
    layers, put there when the model has been cut."""
    plain = build(name)
    reference, worst = torch.optim.SGD(plain.parameters(), lr=0.05), 0.0
    with sw.init(layout, device="cpu") as world:
        model = parallel(name, world, **options)
        for block in model.blocks if observer is not None else ():
            block.attention.qkv.register_forward_hook(observer)
            block.attention.register_forward_pre_hook(_arrange)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss_of, count=count)
        for num in lengths:
            given = batch(num, num, name)
            given["labels"][1, -1] = 5  # one counts
            output = plain(**{key: value for key, value in given.items() if key != "labels"})
            loss = loss_of(output, given) / int(count(given))
            loss.backward()
            reference.step()
            reference.zero_grad()
            found = step([given])
            worst = max(worst, abs(float(found.loss) - float(loss)) / float(loss))
            state = sw.full_state_dict(model)
            if world.is_main:
                worst = max(worst, largest_error(state, dict(plain.named_parameters())))
    return worst


class InBlock(Block):
    """Calls attention in its own code."""

    def forward(self, x, mask=None):
        qkv = self.attention.qkv(self.norm(x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(*map(heads, qkv), is_causal=True)
        x = x + self.attention.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def own_loop(name, layout, kind, *, in_block=False, **options):
    """The largest error of parameters after two windows of a loop of one's own, with ``sw.window`` or ``sw.accumulate``."""
    plain = build(name)
    for block in plain.blocks if in_block else ():
        block.__class__ = InBlock
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    with sw.init(layout, device="cpu") as world:
        example = {"input_ids": batch(1, 24, name)["input_ids"]}
        model = sw.parallelize(copy.deepcopy(plain), world, example=example, **options)
        optim, data = torch.optim.SGD(model.parameters(), lr=0.05), world.axis("dp")
        for micro in windows(name, steps=2):
            total = sum(int(count(given)) for given in micro)
            for given in micro:
                (loss_of(plain(given["input_ids"]), given) / total).backward()
            reference.step()
            reference.zero_grad()
            mine = micro[data.rank :: data.size]
            if kind == "window":
                with sw.window(model, mine) as window:
                    for given in window:
                        output = model(given["input_ids"])
                        labels = sw.cut_sequence(model, given["labels"])
                        assert labels.shape == output.shape[:2]
                        (loss_of(output, {"labels": labels}) / window.num_tokens).backward()
            else:
                num = sw.count_tokens(model, mine)
                for i, given in enumerate(mine):
                    with sw.accumulate(model, is_last=i == len(mine) - 1):
                        output = model(given["input_ids"])
                        cut = sw.cut_sequence(model, given)
                        whole = sw.join_sequence(model, output)
                        assert whole.shape[:2] == given["labels"].shape
                        if kind == "joined":
                            loss = loss_of(whole, given) / world.axis("cp").size
                        else:
                            loss = loss_of(output, cut)
                        (loss / num).backward()
            optim.step()
            optim.zero_grad()
        state = sw.full_state_dict(model)
        return largest_error(state, dict(plain.named_parameters())) if world.is_main else 0.0


def whole_answer(name, layout):
    """Whether a forward without gradients gives what one process gives, in and out of a window; and the loss of an evaluation."""
    plain = build(name).eval()
    given = batch(3, 23, name)
    inputs = {key: value for key, value in given.items() if key != "labels"}
    with sw.init(layout, device="cpu") as world, torch.no_grad():
        model = parallel(name, world).eval()
        error = float((model(**inputs) - plain(**inputs)).abs().max())
        found = sw.evaluate(model, [given], loss=loss_of, count=count)
        expected = float(loss_of(plain(**inputs), given)) / int(count(given))
        return error, abs(found["loss"] - expected) / expected, found["num_tokens"], int(count(given))


class Flagged(Words):
    def forward(self, input_ids, position_ids=None, scale=1.0, labels=None):
        return super().forward(input_ids, position_ids) * scale


class Embedded(Words):
    """Is given the vectors of its tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Identity()


class Checkpointed(Words):
    """Runs attention of a block again in backward, by torch's own function."""

    def __init__(self):
        super().__init__()
        self.blocks[1].attention = Again()


class Again(Attention):
    def __init__(self):
        super().__init__("")

    def forward(self, x, mask=None):
        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        y = checkpoint(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v, use_reentrant=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class TwoStreams(Words):
    """Two sequences, each through blocks of its own."""

    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList(Block("", "") for _ in range(2))

    def forward(self, input_ids, other):
        x, y = self.tokens(input_ids), self.tokens(other)
        for block in self.blocks:
            x = block(x, None)
        for block in self.others:
            y = block(y, None)
        return self.head(x) + self.head(y)


class Added(nn.Module):
    """A block with a second argument, which the model changes in place between its blocks."""

    def __init__(self):
        super().__init__()
        self.block = Block("", "")

    def forward(self, x, extra):
        return self.block(x + extra)


class InPlace(Words):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Added() for _ in range(3))

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        extra = torch.zeros_like(x)
        for block in self.blocks:
            extra.add_(self.places.weight[: input_ids.shape[1]].detach())
            x = block(x, extra)
        return self.head(x)


class Drops(Words):
    """With dropout before its blocks, in them and behind them; of as many groups of channels as a rank has positions; in attention to what
    has none; and a block that is left out at random."""

    def __init__(self):
        super().__init__(extra="dropout")
        self.before, self.behind, self.channels, self.drawn = nn.Dropout(0.3), nn.Dropout(0.3), nn.Dropout(0.3), []
        self.kept: list[float] = []
        self.memory = nn.Parameter(torch.zeros(1, 1, 6, 32))

    def forward(self, input_ids):
        x = self.before(self.tokens(input_ids))
        for block in self.blocks:
            if not self.training or float(torch.rand(())) > 0.3:
                x = block(x)
        x = x * self.channels(torch.ones(len(x), 1, 8)).repeat_interleave(4, -1)
        memory = self.memory.expand(len(x), -1, -1, -1)
        chance = 0.3 if self.training else 0.0
        y = F.scaled_dot_product_attention(x[:, None], memory, memory + 1, dropout_p=chance)[:, 0]
        x = x + y
        if self.training:
            self.kept.append(y[..., 0].tolist())
            self.drawn.append(float(torch.rand(())))
        return self.head(self.behind(self.norm(x)))


def dropped(layout, **options):
    """The shape of what was dropped in each call, and where; and the losses."""
    found = []
    with sw.init(layout, device="cpu") as world:
        torch.manual_seed(0)
        model = sw.parallelize(Drops, world, **options)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(
                    lambda _, args, y: found.append((tuple(y.shape), ((y == 0) & (args[0] != 0)).flatten().tolist()))
                )
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss_of, count=count)
        losses = [float(step([batch(i, 16), batch(i + 5, 15)]).loss) for i in range(2)]
        return found, [*losses, *model.drawn], model.kept


def train_and_save(layout, folder, steps):
    """The number of steps that a checkpoint has, and the losses of the steps behind them; saves again."""
    with sw.init(layout, device="cpu") as world:
        model = parallel("plain", world)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        step, data = sw.TrainStep(model, optim, loss=loss_of, count=count), world.axis("dp")
        manager = sw.CheckpointManager(folder, step)
        manager.load()
        done = step.num_steps
        losses = [float(step(windows("plain", steps=4)[done + i][data.rank :: data.size]).loss) for i in range(steps)]
        manager.save()
        manager.close()
        return done, losses


def with_other_data(layout, how):
    """What ranks along cp with other samples end in."""
    with sw.init(layout, device="cpu") as world:
        model = parallel("plain", world)
        given = batch(1 + (how != "equal") * world.rank, 12)
        try:
            if how == "evaluate":
                sw.evaluate(model, [given], loss=loss_of, count=count)
            else:
                sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss_of, count=count)([given])
        except sw.RankError as error:
            return str(error)
        return "nothing was raised"


def _each(output, given):
    return F.cross_entropy(output.transpose(1, 2), given["labels"].clamp_min(0), reduction="none")


LOSSES = {
    "a mean over each sample": lambda output, given: _each(output, given).mean(1).sum(),
    "a shift in the loss": lambda output, given: loss_of(output[:, :-1], {"labels": given["labels"][:, 1:]}),
    "a pooled output": lambda output, given: output.mean(1).square().sum(),
    "a pair of answers": lambda output, given: -F.logsigmoid(_each(output, given).sum(1)).sum(),
    "an entry of its own": lambda output, given: {
        "loss": loss_of(output, given),
        "spread": output.var(1).sum(),
    },
}


class OfSamples(nn.Module):
    """Leaves some samples out."""

    def forward(self, x):
        return x * nn.functional.dropout(x.new_ones(len(x), 1, 1), 0.4, self.training)


class Dropping(Words):
    def __init__(self):
        super().__init__()
        self.blocks[1].drop = OfSamples()


def refused(case):
    """The error that a use ends in."""
    from shardwise.errors import ShardwiseError

    with sw.init("cp=2", device="cpu") as world:
        try:
            _use(case, world)
        except ShardwiseError as error:
            return str(error)
        return "nothing was raised"


def _use(case, world):
    if case == "checkpoint":
        model = sw.parallelize(Checkpointed, world, example={"input_ids": batch(1, 24)["input_ids"]})
    elif case == "a sequence of another length":
        ids = batch(1, 24)["input_ids"]
        model = sw.parallelize(TwoStreams, world, example={"input_ids": ids, "other": ids})
    elif case in ("labels", "another flag"):
        model = sw.parallelize(Flagged, world, example={"input_ids": batch(1, 24)["input_ids"]})
    elif case == "compiled drops of samples":
        model = sw.parallelize(
            Dropping, world, example={"input_ids": batch(1, 24)["input_ids"]}, compile=sw.Compile(backend="aot_eager")
        )
    elif case == "a prompt that is trained":
        model = sw.parallelize(Embedded, world, example={"input_ids": torch.ones(2, 24, WIDTH)})
    else:
        model = parallel("pooled" if case == "own loop of a whole output" else "plain", world)
    given = batch(1, 12)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    if case == "more arguments":
        more = {**given, "position_ids": torch.arange(12).expand(2, -1)}
        sw.TrainStep(model, optim, loss=loss_of, count=count)([more])
    if case == "forward in the loss":
        loss = lambda output, part: loss_of(model(part["input_ids"]), part)  # noqa: E731
        sw.TrainStep(model, optim, loss=loss, count=count)([given])
    if case == "a sequence of another length":
        short = {**given, "other": given["input_ids"][:, :6]}
        sw.TrainStep(model, optim, loss=loss_of, count=count)([short])
    if case == "checkpoint":
        sw.TrainStep(model, optim, loss=loss_of, count=count)([given])
    if case in LOSSES:
        sw.TrainStep(model, optim, loss=LOSSES[case], count=count)([given])
    if case == "evaluated":
        sw.evaluate(model, [given], loss=LOSSES["a mean over each sample"], count=count)
    if case == "labels":
        sw.TrainStep(
            model, optim, loss=loss_of, count=count, forward=lambda m, b: m(b["input_ids"], labels=b["labels"])
        )([given])
    if case == "another flag":
        flagged = lambda m, b: m(b["input_ids"], scale=2.0)  # noqa: E731
        sw.TrainStep(model, optim, loss=loss_of, count=count, forward=flagged)([given])
    if case == "own loop of a whole output":
        with sw.window(model, [given]) as window:
            next(iter(window))
    if case == "join of another tensor":
        with sw.window(model, [given]) as window:
            for part in window:
                model(part["input_ids"])
                sw.join_sequence(model, torch.zeros(2, 11))
    if case == "join of an older forward":  # rank 0 has 6 positions of 11 and of 12
        with sw.window(model, [batch(1, 11), given]) as window:
            first, _ = [model(part["input_ids"]) for part in window]
            sw.join_sequence(model, first)
    if case == "a teacher":
        teacher = build("plain")
        forward = lambda m, b: m(b["input_ids"]) - teacher(b["input_ids"])  # noqa: E731
        sw.TrainStep(model, optim, loss=loss_of, count=count, forward=forward)([given])
    if case == "cut before a forward":
        sw.cut_sequence(model, given)
    if case == "a prompt that is trained":
        prompt = torch.ones(2, 4, WIDTH, requires_grad=True)
        vectors = torch.cat([prompt, torch.ones(2, 8, WIDTH)], 1)
        sw.TrainStep(model, optim, loss=loss_of, count=count)([{**given, "input_ids": vectors}])
    if case == "an entry of another length":
        forward = lambda m, b: m(b["input_ids"])  # noqa: E731
        step = sw.TrainStep(model, optim, loss=loss_of, count=count, forward=forward)
        step([{**given, "weights": torch.ones(2, 12)}, {**batch(1, 9), "weights": torch.ones(2, 12)}])
    if case == "an entry of another length, in a loop":
        with sw.window(model, [given, batch(1, 9), batch(1, 13)]) as window:
            for part in window:
                model(part["input_ids"])
                sw.cut_sequence(model, {**part, "weights": torch.ones(2, 12)})


def two_outputs(layout):
    """The largest error of losses of two forwards, and of weights of samples that are as many as the positions of the second micro-batch."""

    def forward(model, given):
        return model(given["input_ids"]), model(given["input_ids"][:, :7].flip(1))

    def loss(outputs, given):
        one = F.cross_entropy(outputs[0].mT, given["labels"], ignore_index=-100, reduction="none").sum(1)
        return (one * given["weights"].mean(1)).sum() + outputs[1].square().sum()

    plain, worst = build("plain"), 0.0
    with sw.init(layout, device="cpu") as world:
        model = parallel("plain", world)
        optim = torch.optim.SGD(model.parameters(), lr=0.0)
        step = sw.TrainStep(model, optim, loss=loss, count=count, forward=forward)
        for num in (11, 24):
            given = {**batch(num, num), "weights": torch.linspace(0.5, 2, 48).view(2, 24)}
            expected = float(loss(forward(plain, given), given)) / int(count(given))
            worst = max(worst, abs(step([given]).loss - expected) / expected)
    return worst


def backward_outside():
    """A backward of a forward with gradients outside of a window."""
    with sw.init("cp=2", device="cpu") as world:
        model = parallel("plain", world)
        try:
            model(batch(1, 12)["input_ids"]).sum().backward()
        except sw.UsageError as error:
            return str(error)
        return "nothing was raised"


def kept_bytes(layout, method="gather"):
    """Bytes that the blocks of a model keep for backward on this rank, each tensor once."""
    with sw.init(layout, device="cpu") as world:
        model = parallel("plain", world, context_parallel=method) if world.size > 1 else parallel("plain", world)
        kept, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

        def note(x):
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights and not isinstance(x, torch.nn.Parameter) and x.shape[-1] != VOCAB:
                kept[storage.data_ptr()] = (x, storage.nbytes())
            return x

        sizes = {tuple(p.shape) for p in model.parameters()}
        count_of = lambda b: (b["labels"] != -100).sum()  # noqa: E731
        loss = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), loss=loss_of, count=count_of)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            loss([batch(1, 256 // 8)])
        rows = {WIDTH, 3 * WIDTH, 48, 8}
        return sum(n for x, n in kept.values() if x.shape[-1] in rows and tuple(x.shape) not in sizes and x.dim() > 2)


def masks_between(layout, length=40):
    """Shapes of masks, of all rows of a rank or of one of its two chunks, that are there between a forward and its backward."""
    with sw.init(layout, device="cpu") as world:
        model = parallel("plain", world, context_parallel="gather")
        with sw.window(model, [batch(1, length)], count=count) as found:
            for given in found:
                output = model(given["input_ids"])
                gc.collect()
                shapes = {tuple(x.shape[-2:]) for x in gc.get_objects() if type(x) is torch.Tensor and x.dim() > 1}
                output.sum().backward()
        return [shape for shape in shapes if shape[0] in (length // 2, length // 4) and not shape[1] % (length // 4)]


class Remembers(Words):
    """Its own code drops in attention of its positions to a memory, which has none."""

    def __init__(self):
        super().__init__()
        self.memory, self.shown = nn.Parameter(torch.ones(1, 1, 6, 32)), nn.Identity()

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x, None)
            x = x + self.recalled(x)
        return self.head(self.norm(x))

    def recalled(self, x):
        memory = self.memory.expand(len(x), -1, -1, -1)
        return self.shown(F.scaled_dot_product_attention(x[:, None], memory, memory, dropout_p=0.3)[:, 0])


class Looks(Block):
    """Some latents look at the positions: they are no rows, and every rank has them whole."""

    def __init__(self):
        super().__init__("", "")
        self.shown = nn.Identity()

    def forward(self, x, latents):
        x = super().forward(x)
        q, k = heads(latents), heads(self.norm(x))
        y = F.scaled_dot_product_attention(q, k, k, dropout_p=0.3 if self.training else 0.0)
        return x, self.shown(latents + y.transpose(1, 2).flatten(2))


class Latent(Words):
    def __init__(self):
        super().__init__()
        self.blocks, self.latents = nn.ModuleList(Looks() for _ in range(2)), nn.Parameter(torch.ones(1, 5, WIDTH))

    def forward(self, input_ids):
        x, latents = self.tokens(input_ids), self.latents.expand(len(input_ids), -1, -1)
        for block in self.blocks:
            x, latents = block(x, latents)
        return self.head(self.norm(latents.mean(1)))


def attended(kind, layout):
    """What attention with dropout, of positions to a memory or of latents to positions, has made: the number of queries, and values."""
    found = []
    with sw.init(layout, device="cpu") as world:
        torch.manual_seed(0)
        build = {"memory": Remembers, "latents": Latent}[kind]
        model = sw.parallelize(
            build, world, example={"input_ids": batch(1, 24)["input_ids"]}, context_parallel="gather"
        )
        for module in model.modules():
            if hasattr(module, "shown"):
                module.shown.register_forward_hook(
                    lambda _, args, y: found.append((y.shape[1], [round(x, 4) for x in y[..., 0].flatten().tolist()]))
                )
        loss = (lambda output, given: output.square().sum()) if kind == "latents" else loss_of
        sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss, count=count)([batch(1, 16)])
    return found
