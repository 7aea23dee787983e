"""How much of the device's arithmetic a run uses: the model's own operations (MFU), and the bytes of its collectives."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise._torch.autograd import TorchDispatchMode
from shardwise._torch.pytrees import tree_flatten
from shardwise.run.build import build_plain
from shardwise.run.config import RunConfig
from shardwise.techniques.precision.options import precision_of
from shardwise.world import World

_COUNTED = 1  # the step of this process whose collectives are counted: the first makes buckets, buffers and graphs

# Dense, from the vendors' data sheets, in FLOP/s; the first name that is a part of the device's is taken.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bfloat16": 2.25e15, "tf32": 1.1e15}),
    ("H200", {"bfloat16": 989.4e12, "tf32": 494.7e12, "float32": 67e12}),
    ("H100 NVL", {"bfloat16": 835e12, "tf32": 417.5e12, "float32": 60e12}),
    ("H100 PCIe", {"bfloat16": 756e12, "tf32": 378e12, "float32": 51e12}),
    ("H100", {"bfloat16": 989.4e12, "tf32": 494.7e12, "float32": 67e12}),
    ("A100", {"bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12}),
    ("L40S", {"bfloat16": 362e12, "tf32": 183e12, "float32": 91.6e12}),
    ("L4", {"bfloat16": 121e12, "tf32": 60e12, "float32": 30.3e12}),
    ("V100", {"float16": 125e12, "float32": 15.7e12}),
    ("MI300X", {"bfloat16": 1307.4e12, "float32": 163.4e12}),
)


class DeviceUse:
    """Of one run, for its log. On rank 0; other ranks have no figures.

    Args:
        lengths: tokens of each sample, without padding; None: each has ``data.seq_len``.
    """

    def __init__(self, config: RunConfig, world: World, lengths: np.ndarray | None = None):
        self._config, self._world, self._lengths = config, world, lengths
        self._flops: float | None = None  # of one step, over all ranks
        self._peak = self._peak_of_device() if world.is_main else None
        self._comm_bytes: int | None = None

    @contextlib.contextmanager
    def counted(self, nth: int) -> Iterator[None]:
        """Around the step number ``nth`` of this process, from 0: the first counts the model's operations, the second the
        bytes of collectives."""
        if not self._world.is_main or nth > _COUNTED:
            yield
            return
        if nth == 0:
            config = self._config
            if config.data.build is not None:  # what a sample is is not known
                yield
                return
            lengths = np.array([config.data.seq_len]) if self._lengths is None else self._lengths
            of_sample = mean_flops(build_plain(config), lengths)
            self._flops = None if of_sample is None else of_sample * config.data.global_batch
            yield
            return
        with _CollectiveBytes() as counter:
            yield
        self._comm_bytes = counter.num_bytes

    def figures(self, steps_per_s: float) -> dict[str, float]:
        """``tflops`` of the model on each rank, ``mfu``, its part of what the device can do (PaLM, appendix B), and
        ``comm_bytes``, of rank 0's collectives in a step; what is not known is left out."""
        found: dict[str, float] = {}
        if self._flops is not None and steps_per_s:
            rate = self._flops * steps_per_s / self._world.size
            found["tflops"] = rate / 1e12
            if self._peak is not None:
                found["mfu"] = rate / self._peak
        if self._comm_bytes is not None:
            found["comm_bytes"] = self._comm_bytes
        return found

    def _peak_of_device(self) -> float | None:
        given = self._config.log.peak_tflops
        if given is not None or self._world.device.type != "cuda":
            return None if given is None else given * 1e12
        dtype = precision_of(self._config.parallel.precision).compute or "float32"
        if dtype == "float32" and self._config.train.tf32:
            dtype = "tf32"
        return peak_flops(torch.cuda.get_device_name(self._world.device), dtype)


def peak_flops(device: str, dtype: str) -> float | None:
    """The dense peak of a device in FLOP/s; None: not known.

    Args:
        device: its name, as ``torch.cuda.get_device_name`` gives it.
        dtype: of the matrix products: "bfloat16", "float16", "float32", or "tf32".
    """
    for name, peaks in _PEAKS:
        if name in device:
            return peaks.get(dtype, peaks.get("bfloat16") if dtype == "float16" else None)
    return None


def mean_flops(model: nn.Module, lengths: np.ndarray) -> float | None:
    """The mean of :func:`flops_of_sample` over samples of so many tokens. Counted for three lengths, and between them by the parabola
    through these: layers grow with the length, attention with its square. ``model`` is used up."""
    counted = np.unique(np.quantile(lengths, [0, 0.5, 1], method="nearest"))
    flops = [flops_of_sample(model, int(length)) for length in counted]
    if None in flops:
        return None
    total = np.zeros(len(lengths))
    for at, f in zip(counted, flops, strict=True):
        total += f * np.prod([(lengths - other) / (at - other) for other in counted if other != at], axis=0)
    return float(total.mean())


def flops_of_sample(model: nn.Module, seq_len: int) -> int | None:
    """Floating-point operations of training on one sample: forward and backward of the whole model, without what remat runs
    again, as ``torch.utils.flop_counter`` counts them (matrix products, attention, convolutions). A frozen layer has no
    gradients of weights. Nothing is computed: the model is moved to meta.

    Args:
        model: the plain, whole model; it stays on meta.

    Returns:
        the number; None if the model cannot run on meta (it reads values of tensors).
    """
    no_anomaly = torch.autograd.set_detect_anomaly(False)  # it looks for NaN, and there are no values
    with contextlib.suppress(Exception), no_anomaly, FlopCounterMode(display=False) as counter:
        model = model.to("meta").train()
        output = model(torch.zeros((1, seq_len), dtype=torch.long, device="meta"))
        if hasattr(output, "to_tuple"):  # of transformers: it begins with the logits where no labels were given
            output = output.to_tuple()
        floating = [x for x in tree_flatten(output)[0] if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.backward([floating[0].sum()])
        return counter.get_total_flops()
    return None


class _CollectiveBytes(TorchDispatchMode):
    """Within: adds up the bytes of collectives: of each the larger side (what is gathered, what is reduced)."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise compiled blocks would run uncompiled within this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not func._schema.name.endswith("wait_tensor"):
            sides = [tree_flatten(arg)[0] for arg in args]
            sizes = [sum(x.numel() * x.element_size() for x in side if isinstance(x, torch.Tensor)) for side in sides]
            self.num_bytes += max(sizes, default=0)
        return func(*args, **(kwargs or {}))
