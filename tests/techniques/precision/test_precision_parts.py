"""Parts with a precision of their own: norms or the head in fp32 while the rest computes in bf16."""

from dataclasses import dataclass
from typing import Any

import models
import pytest
import torch
from layouts import KINDS, every_layout
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import functional_call

from shardwise import Compile, Precision, Sharding
from shardwise.errors import ConfigError, ShardwiseError, UnsupportedError
from shardwise.parallel import describe, parallelize, recipe_of, runtime_of
from shardwise.recipe import Recipe, dtype_groups
from shardwise.step.loss import next_token_loss
from shardwise.step.step import TrainStep
from shardwise.step.window import window
from shardwise.verify.sharded import CountCollectives, share_of
from shardwise.world import init

BLOCKS = Sharding(min_unit_bytes=0)
PARTS = {"RMSNorm": "fp32", "head": "fp32"}


def bf16(**parts: str) -> Precision:
    return Precision(storage="float32", compute="bfloat16", reduce="float32", parts=parts)


def reference() -> nn.Module:
    torch.manual_seed(0)
    return models.get("reference").build()


def micro_batches(num: int) -> list[dict[str, Tensor]]:
    return models.get("reference").windows(1, num)[0]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


# ---- numbers -----------------------------------------------------------------------------------------------------------


def on_ranks(layout: str, parts: dict[str, str], options: dict[str, Any]) -> tuple:
    """Gradients, and the dtypes that modules saw: (weight, input, output)."""
    with init(layout, device="cpu", timeout_s=30) as world:
        model = parallelize(reference(), world, precision=bf16(**parts), **{"sharding": BLOCKS, **options})
        saw: dict[str, tuple] = {}
        for name in ("blocks.1.ffn_norm", "blocks.1.ffn.up", "norm", "head", "blocks.1.attention.rotary"):
            model.get_submodule(name).register_forward_hook(_noting(saw, name))
        with window(model, share_of(micro_batches(2 * world.size), world)) as w, CountCollectives() as counter:
            for batch in w:
                logits = model(batch["input_ids"])
                (next_token_loss(logits, batch) / w.num_tokens).backward()
        grads = {name: whole(param.grad) for name, param in runtime_of(model).parameters.items()}
        recipe = recipe_of(model)
        assert Recipe.from_json(recipe.to_json()) == recipe
        groups = sum(len(dtype_groups(recipe.params, unit.name)) for unit in recipe.units)
        tables = {buffer.dtype for buffer in model.buffers()}
        return grads, saw, logits.dtype, groups, counter.counts.get("_reduce_scatter_base", 0), tables, describe(model)


def _noting(saw: dict[str, tuple], name: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        weight = getattr(module, "weight", None)
        saw[name] = (None if weight is None else weight.dtype, args[0].dtype, output.dtype)

    return hook


def plain(dtype: torch.dtype, num: int, parts: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """One process, plain torch: parameters cast for each micro-batch, those of ``parts`` left in fp32 between two casts."""
    model = reference().double() if dtype == torch.float64 else reference()
    for name, child in model.named_modules():
        if name.endswith(parts) and parts:
            child.forward = _between_casts(child.forward, None if name == "head" else dtype)
    masters = dict(model.named_parameters())
    batches = micro_batches(num)
    num_tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    for batch in batches:
        cast = {n: p if parts and n.rpartition(".")[0].endswith(parts) else p.to(dtype) for n, p in masters.items()}
        (next_token_loss(functional_call(model, cast, (batch["input_ids"],)), batch) / num_tokens).backward()
    return {name: param.grad for name, param in masters.items()}


def _between_casts(forward: Any, back: torch.dtype | None) -> Any:
    return lambda x: forward(x.float()) if back is None else forward(x.float()).to(back)


def error_norm(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert set(grads) == set(exact)
    return sum(float((grads[name].double() - exact[name]).pow(2).sum()) for name in exact) ** 0.5


@every_layout(*KINDS, soak=("fsdp-4", "hsdp-2x2"))
def test_parts_compute_in_their_own_precision(ranks, layout):
    exact, mine = (
        plain(torch.float64, 2 * layout.num_ranks),
        plain(torch.bfloat16, 2 * layout.num_ranks, ("norm", "head")),
    )
    noise, b, f = error_norm(mine, exact), torch.bfloat16, torch.float32
    assert noise > 0
    for grads, saw, logits, groups, reductions, tables, text in ranks.run(
        on_ranks, layout.num_ranks, layout.text, PARTS, {}
    ):
        assert error_norm(grads, exact) <= 1.02 * noise
        if layout.num_ranks == 1:
            assert all(torch.equal(grads[name], mine[name]) for name in mine)
        assert saw["blocks.1.ffn_norm"] == saw["norm"] == (f, f, b) and saw["blocks.1.ffn.up"] == (b, b, b)
        assert saw["head"] == (f, f, b) and logits == f  # handed out as the head made them
        assert groups == 8 and (
            layout.text != "dp_shard=2" or reductions == 8
        )  # two in each unit: three blocks and the root
        assert tables == {torch.float32}
        assert "fp32, named by 'RMSNorm'" in text and "precision: 1 module (head)" in text


def test_without_parts_all_is_bf16(ranks):
    b = torch.bfloat16
    _, saw, logits, groups, reductions, _, _ = ranks.run(on_ranks, 2, "dp_shard=2", {}, {})[0]
    assert saw["norm"] == saw["head"] == (b, b, b) and logits == b and groups == reductions == 4


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        pytest.param(PARTS, {"remat": "full"}, id="remat"),
        pytest.param(PARTS, {"sharding": Sharding(units=("blocks.*", "head"))}, id="head-its-own-unit"),
        pytest.param(PARTS, {"sharding": Sharding(units="none")}, id="one-unit"),
        pytest.param(PARTS, {"compile": "blocks"}, id="compile", marks=pytest.mark.soak),
    ],
)
def test_parts_beside_other_techniques(ranks, parts, options):
    mine, exact = plain(torch.bfloat16, 4, ("norm", "head")), plain(torch.float64, 4)
    for grads, saw, logits, *_ in ranks.run(on_ranks, 2, "dp_shard=2", parts, options):
        assert error_norm(grads, exact) <= 1.02 * error_norm(mine, exact)
        assert logits == torch.float32 and saw["head"][0] == torch.float32


def test_a_part_without_parameters_is_cast_too(ranks):
    f, b = torch.float32, torch.bfloat16
    _, saw, logits, groups, *_ = ranks.run(on_ranks, 2, "dp_shard=2", {"Rotary": "fp32"}, {})[0]
    assert saw["blocks.1.attention.rotary"] == (None, f, b) and logits == b and groups == 4


# ---- what is inside what, and where casts end --------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        self.saw = x.dtype, position.clone(), self.first.weight.dtype, self.second.weight.dtype
        return self.second(self.first(x)), position


class Outer(nn.Module):
    """Ids go in, so nothing tells the embedding what is computed in around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(8, 4), Inner(), nn.Linear(4, 2)
        self.register_buffer("table", torch.tensor([1.0, 0.1234567]), persistent=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x, position = self.embed(ids), torch.arange(ids.shape[-1], dtype=torch.float32) + 4095.0
        inside, position = self.inner(x, position)
        return {"early": inside, "out": self.head(inside), "embedded": x * 1, "ids": ids}


def nested(parts: dict[str, str], storage: str) -> tuple:
    with init("dp_shard=1", device="cpu") as world:
        precision = Precision(storage=storage, compute="bfloat16", reduce="float32", parts=parts)
        model = parallelize(Outer(), world, precision=precision)
        out = model(torch.arange(4))
        out["out"].sum().backward()
        stored = {name: param.storage for name, param in recipe_of(model).params.items()}
        kept = {name: param.dtype for name, param in model.named_parameters()}
        assert {name: getattr(torch, dtype) for name, dtype in stored.items()} == kept
        return {key: value.dtype for key, value in out.items()}, model.inner.saw, stored, model.table


def test_a_part_in_a_part_and_what_is_handed_out(ranks):
    f, b = torch.float32, torch.bfloat16
    parts = {"embed": "fp32", "inner": "fp32", "inner.second": "bf16"}
    dtypes, saw, _, table = ranks.run(nested, 1, parts, "float32")[0]
    assert dtypes == {"early": f, "out": b, "embedded": b, "ids": torch.int64}  # early: as the part made it
    assert saw[0] == f and saw[2:] == (f, b)
    assert torch.equal(saw[1], torch.arange(4.0) + 4095) and torch.equal(table, torch.tensor([1.0, 0.1234567]))


def test_a_part_is_stored_in_its_own_precision(ranks):
    _, _, stored, _ = ranks.run(nested, 1, {"head": "fp32"}, "bfloat16")[0]
    assert stored["head.weight"] == "float32" and stored["embed.weight"] == "bfloat16"


def kept_values(storage: str) -> tuple:
    with init("dp_shard=1", device="cpu") as world:
        model = Outer()
        before = model.head.weight.detach().clone()
        precision = Precision(storage=storage, compute="bfloat16", reduce="float32", parts={"head": "fp32"})
        return before, whole(parallelize(model, world, precision=precision).head.weight)


def test_values_of_a_part_are_not_rounded_on_the_way(ranks):
    before, after = ranks.run(kept_values, 1, "bfloat16")[0]
    assert torch.equal(before, after)


def trained_half(_: str) -> tuple:
    with init("dp_shard=1", device="cpu") as world:
        model = parallelize(reference(), world, precision=Precision(parts={"blocks.*": "fp16"}))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return step(share_of(micro_batches(1), world)).loss_scale


def test_a_part_in_float16_has_a_scaler(ranks):
    assert ranks.run(trained_half, 1, "")[0] == 65536.0


class Normed(nn.Module):
    """A batch norm of two names, and a weight norm, over whose module torch puts a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.norm, self.out = nn.BatchNorm1d(4), nn.Bilinear(4, 4, 2)
        self.again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.again(self.out(x, x).repeat(1, 2))


def normed(precision: str | Precision) -> tuple:
    with init("dp_shard=1", device="cpu") as world:
        torch.manual_seed(0)
        model = parallelize(Normed(), world, precision=precision)
        out = model(torch.randn(6, 4))
        out.float().square().sum().backward()
        computed = {name: param.compute for name, param in recipe_of(model).params.items()}
        return out.dtype, computed, model.norm.running_mean.dtype, bool(model.norm.running_mean.any()), describe(model)


@pytest.mark.parametrize("word", ["bfloat16", "float16", "float64"])
def test_batch_norm_computes_in_the_dtype_of_its_statistics(ranks, word):
    dtype, computed, statistics, counted, text = ranks.run(normed, 1, word)[0]
    assert dtype == getattr(torch, word) and statistics == torch.float32 and counted
    assert computed["norm.weight"] == "float32" and computed["out.weight"] == word
    assert "precision: 2 modules (norm, again): float32, the dtype of its running statistics" in text


def test_a_class_means_its_parametrized_modules_too(ranks):
    _, computed, *_ = ranks.run(normed, 1, bf16(Linear="fp32"))[0]
    assert {name: dtype for name, dtype in computed.items() if name.startswith("first.")} == {
        "first.bias": "float32",
        "first.parametrizations.weight.original0": "float32",
        "first.parametrizations.weight.original1": "float32",
    }
    assert computed["out.weight"] == "bfloat16"


# ---- changes in place --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logits:
    logits: Tensor


class Biased(nn.Module):
    """Works in place on what its head returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.bias = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Logits:
        y = self.head(self.embed(x))
        y += self.bias
        return Logits(y)


class Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> None:
        x.mul_(2.0).add_(self.by)


class Shifted(nn.Module):
    """Counts on a part that changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.part = nn.Linear(4, 4), Shifts()

    def forward(self, x: Tensor) -> Logits:
        x = self.embed(x) * 1.0
        self.part(x)
        return Logits(x)


def changed_in_place(cls: type[nn.Module], parts: dict[str, str]) -> tuple:
    with init("dp_shard=1", device="cpu") as world:
        torch.manual_seed(0)
        model = parallelize(cls(), world, precision=bf16(**parts))
        out = model(torch.ones(3, 4)).logits
        out.float().sum().backward()
        with torch.inference_mode():  # counts no versions
            held = model(torch.ones(3, 4)).logits.float()
        grads = {name: whole(param.grad) for name, param in runtime_of(model).parameters.items()}
        return out.dtype, out.detach().float(), held.numpy().copy(), grads


@pytest.mark.parametrize(("cls", "part", "changed"), [(Biased, "head", "bias"), (Shifted, "part", "part.by")])
def test_what_is_changed_in_place_at_the_edge_of_a_part_counts(ranks, cls, part, changed):
    _, plain, _, wanted = ranks.run(changed_in_place, 1, cls, {})[0]
    dtype, found, held, grads = ranks.run(changed_in_place, 1, cls, {part: "fp32"})[0]
    assert dtype == (torch.float32 if part == "head" else torch.bfloat16)
    assert torch.equal(grads[changed], wanted[changed]) and grads[changed].eq(3).all()
    for values in (found, torch.tensor(held)):
        assert torch.allclose(values, plain, rtol=0.02, atol=0.02)


class Stays(Shifts):
    """The same on a copy."""

    def forward(self, x: Tensor) -> None:
        super().forward(x.clone())


class ShiftedBlock(nn.Module):
    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(4, 4), part()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * 1.0
        self.part(y)
        return x + y


class ShiftedBlocks(nn.Module):
    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ShiftedBlock(part) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def changed_in_graphs(part: type[nn.Module], remat: str | None) -> tuple[str | None, str, int]:
    with init("dp_shard=1", device="cpu") as world:
        precision, graph = bf16(**{part.__name__: "fp32"}), Compile(backend="aot_eager", fullgraph=True)
        model = parallelize(ShiftedBlocks(part), world, precision=precision, compile=graph, remat=remat)
        graphs = counters["stats"]["unique_graphs"]
        try:
            model(torch.ones(3, 4, requires_grad=True)).float().sum().backward()
        except UnsupportedError as error:
            return error.name, str(error), counters["stats"]["unique_graphs"] - graphs
        return None, "", counters["stats"]["unique_graphs"] - graphs


@pytest.mark.quick("full")
@pytest.mark.parametrize("remat", [None, "full"])
def test_a_part_of_a_compiled_block_that_changes_its_input_is_refused(ranks, remat):
    """It changed a copy, and what is around it went on with what was there before."""
    name, text, graphs = ranks.run(changed_in_graphs, 1, Shifts, remat)[0]
    assert name == "blocks.0.part" and "changes its input in place in a compiled block" in text and graphs == 1
    assert ranks.run(changed_in_graphs, 1, Stays, remat)[0] == (None, "", 1)


# ---- refusals ------------------------------------------------------------------------------------------------------------


class Tied(Outer):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def refused(cls: type[nn.Module], precision: Precision) -> str:
    with init("dp_shard=1", device="cpu") as world:
        try:
            parallelize(cls(), world, precision=precision)
        except ShardwiseError as error:
            return f"{type(error).__name__} {error}"
        return ""


@pytest.mark.parametrize(
    ("cls", "parts", "words"),
    [
        (Outer, {"heat": "fp32"}, ("PlanError", "{'heat': 'fp32'}", "no module's class", "did you mean 'head'")),
        (Outer, {"head": "bf16"}, ("PlanError", "head: ", "would have no effect")),
        (Outer, {"head": "fp32", "Linear": "bf16"}, ("PlanError", "'head': 'fp32'", "another pattern means the same")),
        (
            Tied,
            {"head": "fp32"},
            ("PlanError", "embed.weight: ", "'head.weight'", "one tensor", "give 'embed' the same"),
        ),
    ],
)
def test_parts_that_cannot_be_are_refused_by_name(ranks, cls, parts, words):
    said = ranks.run(refused, 1, cls, bf16(**parts))[0]
    assert all(word in said for word in words), said


class Bank(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({"a": nn.Linear(4, 4)})
        self.scale = nn.Parameter(torch.ones(4))


class Banked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bank = Bank()

    def forward(self, x: Tensor) -> Tensor:
        return self.bank["a"](x) * self.bank.scale


def test_a_container_that_holds_a_parameter_is_refused_as_a_part(ranks):
    said = ranks.run(refused, 1, Banked, bf16(bank="fp32"))[0]
    assert all(word in said for word in ("PlanError", "bank.scale: ", "of a Bank that holds", "'bank.*'")), said
    assert ranks.run(refused, 1, Banked, bf16(**{"bank.*": "fp32"})) == [""]


def test_tied_parts_of_one_precision_are_fine(ranks):
    assert ranks.run(refused, 1, Tied, bf16(head="fp32", embed="fp32")) == [""]


def test_a_part_takes_a_precision():
    with pytest.raises(ConfigError, match="neither a precision"):
        Precision(parts={"head": "int8"})
    with pytest.raises(ConfigError, match="Precision\\(parts"):
        Precision(parts={"head": 16})  # type: ignore[dict-item]
