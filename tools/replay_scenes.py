"""Records for ``tools/replay.py`` the recipes that one source tree makes, the steps it takes and the files it writes.

    PYTHONPATH=TREE/src:TREE/tests python tools/replay_scenes.py recipes OUT.json

Only public names of the package are used, and models of the tree's own tests, so that the same file runs on the code before and after a
change of structure. A record is a mapping from the name of a fact to JSON. Two records of one tree are equal: seeds are fixed, and what
differs from run to run by nature (times, tokens, paths) is left out of files by ``VARYING``.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from replay import MODULES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.testing import RankPool

__all__ = ["SCENES", "record"]

Record = dict[str, Any]

# ---- models ---------------------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """Blocks with dropout, a frozen part, a part that no loss reaches, and a tie: what the models of the tests leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Dropout(0.3), nn.GELU()) for _ in range(3)
        )
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.unused = nn.Linear(12, 3)
        self.head = nn.Linear(12, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.frozen(x))


def modules_of(name: str) -> list[ModuleType]:
    """The module ``name`` of an older tree's tests, or those of this tree's that have its models now."""
    try:
        return [importlib.import_module(name)]
    except ModuleNotFoundError:
        return [importlib.import_module(now) for now in MODULES[name]]


def all_cases() -> dict[str, Any]:
    """Every model of the tests that can be built here: objects with ``build windows loss count forward``."""
    cases: dict[str, Any] = {}
    for name in ("zoo", "families", "handwritten.models", "packages"):
        for module in modules_of(name):
            cases |= _cases_in(module)
    cases["dropped"] = dataclasses.replace(cases["reference"], name="dropped", build=Dropped)
    return cases


def _cases_in(module: ModuleType) -> dict[str, Any]:
    """Name -> model, of a table of records, or of one of the tables that an older tree has."""
    if hasattr(module, "MODELS"):
        return {model.name: model for model in module.MODELS}
    tables = [getattr(module, name, {}) for name in ("CASES", "FAMILIES", "WRITTEN", "PACKAGES")]
    return {name: getattr(model, "case", model) for table in tables for name, model in table.items()}


def all_builders() -> dict[str, Callable[[], nn.Module]]:
    """Functions that build a model: those of all cases, and the odd constructors that the tests of initialisation have."""
    builders = {name: case.build for name, case in all_cases().items()}
    made_in = [(module, *pair) for module in modules_of("parallel.constructors") for pair in vars(module).items()]
    for module, name, made in sorted(made_in, key=lambda found: found[1]):
        if name[0] == "_" or getattr(made, "__module__", "") != module.__name__ or not callable(made):
            continue
        parameters = inspect.signature(made).parameters.values()
        if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            continue
        with contextlib.suppress(Exception):
            if isinstance(made(), nn.Module):
                builders[f"constructors.{name}"] = made
    return builders


STEPPED = (
    "reference", "conv", "recurrent", "odd", "branches", "experts", "inplace", "dropped", "llama", "t5", "vit", "nanogpt",
)  # fmt: skip
COMPILED = ("reference", "llama", "dropped")


# ---- recipes --------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "dp_shard=1": 1,
    "dp_shard=2": 2,
    "dp_shard=4": 4,
    "dp_replicate=2": 2,
    "dp_replicate=2,dp_shard=2": 4,
    "dp_replicate=4,dp_shard=8": 32,
}
SMALL_UNITS = {"sharding": {"min_unit_bytes": 0}}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "each block a unit": SMALL_UNITS,
    "bf16 and remat": {**SMALL_UNITS, "precision": "bf16", "remat": "full"},
    "compile": {**SMALL_UNITS, "compile": "blocks"},
    "offload": {"sharding": {"min_unit_bytes": 0, "offload": True}},
}
STEP_OPTIONS = OPTIONS | {
    "selective, kept, ahead": {
        "remat": "selective",
        "sharding": {
            "min_unit_bytes": 0,
            "reshard_after_forward": False,
            "prefetch": sw.Prefetch(forward=2, backward=2),
            "sync_every_microbatch": True,
            "buffers": "mean",
        },
    },
}


def _keywords(options: dict[str, Any]) -> dict[str, Any]:
    return {key: sw.Sharding(**value) if key == "sharding" else value for key, value in options.items()}


def recipes() -> Record:
    """Recipes of every model under every layout and set of options, or the error that one ends in; no ranks."""
    found: Record = {}
    for name, build in all_builders().items():
        for layout, size in LAYOUTS.items():
            for words, options in OPTIONS.items():
                found[f"{name} | {layout} | {words}"] = _recipe(build, layout, size, options)
    return found


def _recipe(build: Callable[[], nn.Module], layout: str, size: int, options: dict[str, Any]) -> Any:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    try:
        with warnings.catch_warnings(record=True) as caught, sw.init(layout, device="cpu") as world:
            warnings.simplefilter("always")
            model = sw.parallelize(build, world, init="load", **_keywords(options))
            return {
                "recipe": json.loads(sw.recipe_of(model).to_json()),
                "describe": sw.describe(model),
                "warned": sorted({str(one.message) for one in caught if issubclass(one.category, UserWarning)}),
            }
    except Exception as error:  # what a group without ranks cannot do is a fact too: values that rank 0 would send
        return f"{type(error).__name__}: {error}"
    finally:
        sys.excepthook = sys.__excepthook__  # each group lays its own over the last one's
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- steps ----------------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Within: ``calls`` lists each collective of this thread as [kind, bytes of its tensors, ranks of its group]."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            leaves = tree_leaves((args, kwargs))
            size = sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
            groups = [dist.ProcessGroup.unbox(leaf) for leaf in leaves if isinstance(leaf, torch.ScriptObject)
                      and "ProcessGroup" in str(leaf._type())]  # fmt: skip
            ranks = [sorted(dist.get_process_group_ranks(group)) for group in groups]
            self.calls.append([func._schema.name.split("::")[1], size, *ranks])
        return func(*args, **(kwargs or {}))


def bits(tensor: Tensor | None) -> str | None:
    """A digest of what this rank holds of a tensor: dtype, shape and bytes."""
    if tensor is None:
        return None
    local = tensor.detach()
    local = (
        (local.to_local() if hasattr(local, "to_local") else local).cpu().clone(memory_format=torch.contiguous_format)
    )
    head = f"{local.dtype} {tuple(local.shape)}".encode()
    return hashlib.sha256(head + local.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _batches(case: Any, world: sw.World, num_windows: int) -> list[list[dict[str, Tensor]]]:
    axis = world.axis("dp")
    windows = case.windows(num_windows, 3 * axis.size, seed=7)
    # Batches of the tests are made for float64 comparisons.
    single = [[{k: v.float() if v.is_floating_point() else v for k, v in b.items()} for b in w] for w in windows]
    return [window[axis.rank :: axis.size] for window in single]


def _state(model: nn.Module, optim: torch.optim.Optimizer) -> Record:
    params = dict(model.named_parameters())
    state = {
        name: {key: bits(value) if isinstance(value, Tensor) else repr(value) for key, value in optim.state[p].items()}
        for name, p in params.items()
        if p in optim.state
    }
    return {
        "parameters": {name: bits(p) for name, p in params.items()},
        "buffers": {name: bits(b) for name, b in model.named_buffers()},
        "optimizer": state,
    }


def train_step(name: str, layout: str, words: str) -> Record:
    """Three windows of a TrainStep on this rank: its collectives, and the bits of everything."""
    case = all_cases()[name]
    with warnings.catch_warnings(), sw.init(layout, device="cpu", seed=5, timeout_s=120) as world:
        warnings.simplefilter("ignore")
        model = sw.parallelize(case.build, world, **_keywords(STEP_OPTIONS[words]))
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
        step = sw.TrainStep(
            model, optim, loss=case.loss, count=case.count, forward=case.forward, scheduler=scheduler, max_grad_norm=0.5
        )
        grads: dict[str, str | None] = {}
        optim.register_step_pre_hook(
            lambda *_: grads.update({n: bits(p.grad) for n, p in model.named_parameters()}),
        )
        found: Record = {"at the start": _state(model, optim)}
        for i, window in enumerate(_batches(case, world, 3)):
            with Collectives() as collectives:
                out = step(window)
            found[f"window {i}"] = {
                "loss": out.loss.hex(),
                "grad_norm": out.grad_norm.hex(),
                "num_tokens": out.num_tokens,
                "gradients": dict(grads),
                "collectives": collectives.calls,
                **_state(model, optim),
            }
        return found


def own_loop(name: str, layout: str, words: str) -> Record:
    """Three windows of the user's own loop, clipped, then a micro-batch in ``accumulate``, and what can be read of the model."""
    case = all_cases()[name]
    with warnings.catch_warnings(), sw.init(layout, device="cpu", seed=6, timeout_s=120) as world:
        warnings.simplefilter("ignore")
        model = sw.parallelize(case.build, world, **_keywords(STEP_OPTIONS[words]))
        optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)
        found: Record = {}
        windows = _batches(case, world, 4)
        for i, window in enumerate(windows[:3]):
            optim.zero_grad()
            losses = []
            with Collectives() as collectives:
                with sw.window(model, window, count=case.count) as micro_batches:
                    for batch in micro_batches:
                        loss = case.loss(case.forward(model, batch), batch) / micro_batches.num_tokens
                        loss.backward()
                        losses.append(float(loss.detach()).hex())
                norm = sw.clip_grad_norm_(model, 0.3)
            found[f"window {i}"] = {
                "losses": losses,
                "norm": float(norm).hex(),
                "gradients": {n: bits(p.grad) for n, p in model.named_parameters()},
                "collectives": collectives.calls,
            }
            optim.step()
            found[f"window {i}"] |= _state(model, optim)
        optim.zero_grad()
        batch = windows[3][0]
        with Collectives() as collectives, sw.accumulate(model, is_last=True):
            case.loss(case.forward(model, batch), batch).backward()
        found["accumulate"] = {
            "gradients": {n: bits(p.grad) for n, p in model.named_parameters()},
            "collectives": collectives.calls,
        }
        with Collectives() as collectives:
            whole = sw.full_state_dict(model)
            state = sw.full_optimizer_state_dict(model, optim)
            with sw.gathered(model):
                held = {n: bits(p) for n, p in model.named_parameters()}
        found["read"] = {
            "full_state_dict": {key: bits(value) for key, value in whole.items()},
            "full_optimizer_state_dict": _leaves(state),
            "gathered": held,
            "collectives": collectives.calls,
        }
        evaluated = sw.evaluate(model, windows[3], loss=case.loss, count=case.count, forward=case.forward)
        found["evaluate"] = {key: float(value).hex() for key, value in evaluated.items()}
        return found


def _leaves(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _leaves(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_leaves(part) for part in value]
    return bits(value) if isinstance(value, Tensor) else repr(value)


STEP_LAYOUTS = {"dp_shard=1": 1, "dp_shard=2": 2, "dp_replicate=2": 2, "dp_replicate=2,dp_shard=2": 4}


def _runs() -> Iterator[tuple[str, Callable[..., Record], int, tuple[str, str, str]]]:
    for name in STEPPED:
        for layout, size in STEP_LAYOUTS.items():
            for words in STEP_OPTIONS:
                if words == "compile" and (name not in COMPILED or layout != "dp_shard=2"):
                    continue
                if words not in ("default", "each block a unit", "bf16 and remat") and layout == "dp_replicate=2":
                    continue  # nothing is cut: options of shards are refused
                yield f"train_step | {name} | {layout} | {words}", train_step, size, (name, layout, words)
            yield f"own_loop | {name} | {layout}", own_loop, size, (name, layout, "each block a unit")


def steps() -> Record:
    """Three windows of twelve models under every layout and set of options, and of a user's own loop."""
    return _on_ranks(_runs())


def _on_ranks(runs: Iterator[tuple[str, Callable[..., Record], int, tuple]]) -> Record:
    found: Record = {}
    with RankPool() as pool:
        for fact, function, size, given in runs:
            try:
                ranks = pool.run(function, size, *given, timeout_s=300)
            except sw.RankError as error:  # refused is a fact like any other
                cause = error.__cause__ or error
                found[fact] = f"{type(cause).__name__}: {cause}"
                continue
            found |= {f"{fact} | rank {rank}": answer for rank, answer in enumerate(ranks)}
            print(fact, file=sys.stderr, flush=True)
    return found


# ---- files ----------------------------------------------------------------------------------------------------------

VARYING = ("time", "sha256", "crc32c")
"""Keys of JSON files whose values no two runs share: a time, and digests of the file that holds it. Bytes of files are compared anyway."""


class Counted:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.count = 3

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def saved(name: str, layout: str, root: str) -> Record:
    """Everything that a trained model can be written as, with the bytes of each file; then a checkpoint resumed from."""
    case = all_cases()[name]
    folder = Path(root)
    with warnings.catch_warnings(), sw.init(layout, device="cpu", seed=5, timeout_s=120) as world:
        warnings.simplefilter("ignore")
        make = functools.partial(_trainer, case, world)
        step = make()
        windows = _batches(case, world, 4)
        with sw.CheckpointManager(folder / "run", step, extra={"seen": Counted()}) as manager:
            for window in windows[:2]:
                step(window)
            manager.save()
            manager.wait()
        sw.save_weights(step.model, folder / "weights", max_shard_bytes=4096)
        sw.save_weights(step.model, folder / "rounded", dtype="bfloat16")
        whole, state = sw.full_state_dict(step.model), sw.full_optimizer_state_dict(step.model, step.optim)
        if world.is_main:
            torch.save(whole, folder / "whole.pt")
        expected = [step(window).loss.hex() for window in windows[2:]]
        again = make()
        with sw.CheckpointManager(folder / "run", again, extra={"seen": Counted()}) as manager:
            manager.load()
        resumed = [again(window).loss.hex() for window in windows[2:]]
        if resumed != expected:
            raise AssertionError(f"resumed with other losses: {resumed} instead of {expected}")
        world.barrier()
        return {
            "losses": expected,
            "full optimizer state": _leaves(state),
            "files": {
                str(p.relative_to(folder)): _file(p)
                for p in sorted(folder.rglob("*"))
                if p.is_file() and p.name != ".lock"
            },
        }


def _trainer(case: Any, world: sw.World) -> Any:
    model = sw.parallelize(case.build, world, **_keywords(SMALL_UNITS))
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
    return sw.TrainStep(
        model, optim, loss=case.loss, count=case.count, forward=case.forward, scheduler=scheduler, max_grad_norm=0.5
    )


def _file(path: Path) -> Any:
    data = path.read_bytes()
    if path.suffix == ".json":
        return _settled(json.loads(data))
    return [len(data), hashlib.sha256(data).hexdigest()[:16]]


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _settled(part) for key, part in value.items() if key not in VARYING}
    return [_settled(part) for part in value] if isinstance(value, list) else value


def files() -> Record:
    """What is written of four models on one, two and four ranks."""
    with tempfile.TemporaryDirectory() as root:
        runs = [
            (f"files | {name} | {layout}", saved, size, (name, layout, f"{root}/{name}-{layout}"))
            for name in ("reference", "odd", "llama", "dropped")
            for layout, size in STEP_LAYOUTS.items()
        ]
        for run in runs:
            Path(run[3][2]).mkdir()
        return _on_ranks(iter(runs))


SCENES: dict[str, Callable[[], Record]] = {"recipes": recipes, "steps": steps, "files": files}


def record(scene: str, out: Path) -> None:
    """Records one scene of the tree that is the working directory."""
    if not Path(str(sw.__file__)).is_relative_to(Path.cwd()):
        raise RuntimeError(
            f"this is the code of {sw.__file__}, not of {Path.cwd()}: set PYTHONPATH to its src and tests"
        )
    out.write_text(json.dumps(SCENES[scene](), indent=0, sort_keys=True), encoding="utf-8")


if __name__ == "__main__":
    # Warm ranks find the functions of this file by the name of its module.
    sys.path.insert(0, str(Path(__file__).parent))
    import replay_scenes

    replay_scenes.record(sys.argv[1], Path(sys.argv[2]))
