"""Shardwise trains any PyTorch module on many processes: DDP, FSDP2, HSDP and tensor parallelism.

    import torch, shardwise as sw

    world = sw.init("dp_shard=2")
    model = sw.parallelize(build_model, world)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = sw.TrainStep(model, optim, loss=sw.next_token_loss, max_grad_norm=1.0)
    for window in sw.Loader(dataset, world, global_batch=64, micro_batch=4):
        out = step(window)

Names are imported when first used, so that importing the package takes milliseconds.
"""

from importlib import import_module
from sys import modules


def _modules() -> dict[str, str]:
    """Public name -> its module, as ``__init__.pyi`` lists them for type checkers."""
    with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as stub:
        lines = [line.split() for line in stub if line.startswith("from ")]
    return {name: module for _, module, _, name, *_ in lines}


__version__ = "0.1.0"
_MODULE_OF = _modules()
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULE_OF[name]), name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch" or "torch" not in modules:
            raise
        raise _unknown_torch(error) from error
    globals()[name] = value
    return value


def _unknown_torch(error: ImportError) -> Exception:
    """The error for a torch version that lacks a private name which Shardwise uses."""
    from shardwise.errors import UnsupportedError

    return UnsupportedError(
        f"torch {modules['torch'].__version__}",
        why=f"something that Shardwise uses of it is not there: {error}",
        fix='pip install "torch>=2.11,<2.15", the versions that its tests ran on, or a newer Shardwise',
    )


def __dir__() -> list[str]:
    return [*__all__]
