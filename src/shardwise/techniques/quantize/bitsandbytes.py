"""The names and forms under which bitsandbytes stores packed weights, as transformers writes and reads them (``*-bnb-4bit``)."""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.model import dtype_of
from shardwise.model.nf4 import BLOCK, GROUP, TABLE, Packing, dynamic_map, unpack
from shardwise.recipe.boxes import Box
from shardwise.recipe.dtypes import FLOATING
from shardwise.techniques.technique import PackedInFile, StoredPart

STATE = ".quant_state.bitsandbytes__"
_STATE = re.compile(r"(.+)\.quant_state\.bitsandbytes__(\w+)")
_BESIDE = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_UNPACK = (
    'take the directory that it was made from, and quantize="nf4" if it is to be packed; or unpack it by transformers: '
    "AutoModelForCausalLM.from_pretrained(DIR).dequantize().save_pretrained(OTHER)"
)


def stored(
    name: str, parts: Mapping[str, str], shape: tuple[int, ...], dtype: str, mean: float
) -> dict[str, StoredPart]:
    """Suffix of the weight's name -> what is stored under it.

    Raises:
        UnsupportedError: rows of an odd number of inputs, which are filled here.
    """
    if shape[1] % 2:
        raise UnsupportedError(
            f"a packed file with a weight of {shape[1]} inputs",
            why="bitsandbytes stores two numbers in a byte across rows, and here each row begins a byte",
            fix="write plain values, save_weights(model, dest); or keep this weight plain: Quantize(keep=(...))",
            name=name,
        )
    packing = Packing.of((shape[0], shape[1]))
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": dtype,
        "shape": [*shape],
        "nested_blocksize": GROUP,
        "nested_dtype": "float32",
        "nested_offset": mean,
    }
    numel = math.prod(shape)
    return {
        "": StoredPart((numel // 2, 1), parts["codes"]),
        ".absmax": StoredPart((packing.num_blocks,), parts["scales"]),
        ".nested_absmax": StoredPart((-(-packing.num_blocks // GROUP),), parts["outer"]),
        ".nested_quant_map": StoredPart((256,), None, torch.tensor(dynamic_map(), dtype=torch.float32)),
        ".quant_map": StoredPart((16,), None, torch.tensor(TABLE, dtype=torch.float32)),
        f"{STATE}nf4": StoredPart((len(text := _bytes(state)),), None, text),
    }


def _bytes(state: Any) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def config(dtype: str, plain: list[str]) -> dict[str, Any]:
    """What config.json says of a directory with packed weights. ``plain``: linear layers whose weight is not packed."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_compute_dtype": dtype if dtype in ("bfloat16", "float16", "float32") else "float32",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": plain,
        "llm_int8_threshold": 6.0,
    }


# ---- reading -----------------------------------------------------------------------------------------------------------


class FoundWeight(PackedInFile):
    def decode(self, box: Box, read: Callable[[str, Box | None], Tensor]) -> Tensor:
        (row, first), (rows, num) = box
        even, end = first // 2 * 2, min(-(-(first + num) // 2) * 2, self.shape[1])
        packing = Packing((self.shape[0], self.shape[1]), ((row, rows),), even, end - even)
        codes = read("codes", Box((row, even // 2), (rows, (end - even) // 2)))
        rest = read("scales", None), read("outer", None), self.made["mean"]
        return unpack(codes, *rest, packing, dtype_of(self.dtype))[:, first - even :][:, :num]


def found(
    tensors: Mapping[str, Any], load: Callable[[str], Tensor], settings: Mapping[str, Any] | None, place: str
) -> dict[str, FoundWeight]:
    """Name -> weight, of all packed weights of a source.

    Raises:
        CheckpointError: they are packed in another way, or damaged.
    """
    weights = (f"{name.removesuffix('.SCB')}.weight" for name in tensors if name.endswith(".SCB"))
    eights = [name for name in weights if name in tensors and tensors[name].dtype == "int8"]
    if eights or (settings or {}).get("load_in_8bit"):
        raise _other(place, "8 bits (LLM.int8)", next(iter(eights), None))
    states = {match[1]: (name, match[2]) for name in tensors if (match := _STATE.fullmatch(name))}
    return {name: _found(name, *state, tensors, load, place) for name, state in states.items()}


def _other(place: str, what: str, name: str | None) -> CheckpointError:
    return CheckpointError(
        f"{place}: weights of bitsandbytes in {what}",
        why="weights in 4 bits are read as NF4, in blocks of 64 whose scales are in 8 bits (double quantisation) in groups of 256",
        fix=_UNPACK,
        name=name,
    )


def _found(
    name: str, state_name: str, kind: str, tensors: Mapping[str, Any], load: Callable[[str], Tensor], place: str
) -> FoundWeight:
    def damaged(why: str) -> CheckpointError:
        return CheckpointError(
            f"{place}: a packed weight that cannot be read",
            why=why,
            fix="copy or export the directory again",
            name=name,
        )

    if kind != "nf4":
        raise _other(place, kind, name)
    if f"{name}.nested_absmax" not in tensors:
        raise _other(place, "NF4 whose scales are in float32 (no double quantisation)", name)
    absent = next((key for key in (name, *(name + suffix for suffix in _BESIDE)) if key not in tensors), None)
    if absent is not None:
        raise damaged(f"{absent} is missing beside {state_name}")
    if tensors[state_name].dtype != "uint8" or not 0 < math.prod(tensors[state_name].shape) <= 1 << 16:
        raise damaged(f"{state_name} is no text")
    try:
        state = json.loads(bytes(load(state_name).flatten().tolist()))
        shape, dtype, mean = tuple(state["shape"]), state["dtype"], float(state["nested_offset"])
        ours = state["quant_type"], state["blocksize"], state["nested_blocksize"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(f"{state_name} is not the JSON that bitsandbytes writes: {error!r}"[:300]) from error
    if ours != ("nf4", BLOCK, GROUP):
        raise _other(place, "{} in blocks of {}, whose scales are in groups of {}".format(*ours), name)
    if len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape) or not math.isfinite(mean):
        raise damaged(f"{state_name} says shape {list(shape)}, nested_offset {mean}"[:300])
    if dtype not in FLOATING:
        raise damaged(f"{state_name} says dtype {dtype!r}"[:300])
    if shape[1] % 2:
        raise _other(place, f"rows of {shape[1]} numbers, so that a byte has numbers of two rows", name)
    packing = Packing.of(shape)
    sizes = {
        name: math.prod(shape) // 2,
        f"{name}.absmax": packing.num_blocks,
        f"{name}.nested_absmax": 4 * -(-packing.num_blocks // GROUP),
        f"{name}.quant_map": 4 * 16,
        f"{name}.nested_quant_map": 4 * 256,
    }
    for key, size in sizes.items():
        there = tensors[key].num_bytes
        if there != size:
            raise damaged(f"{key} has {there} bytes, and a weight of shape {list(shape)} has {size} there")
    for key in (f"{name}.nested_absmax", f"{name}.quant_map", f"{name}.nested_quant_map"):
        if tensors[key].dtype != "float32":
            raise damaged(f"{key} is {tensors[key].dtype}, and not float32")
    for key, values in ((f"{name}.quant_map", TABLE), (f"{name}.nested_quant_map", dynamic_map())):
        if not torch.equal(load(key).flatten(), torch.tensor(values, dtype=torch.float32)):
            raise damaged(f"{key} is not the table of {'NF4' if values is TABLE else 'the scales in 8 bits'}")
    parts = {
        "codes": (name, packing.codes_shape),
        "scales": (f"{name}.absmax", packing.scales_shape),
        "outer": (f"{name}.nested_absmax", (-(-packing.num_blocks // GROUP),)),
    }
    beside = (*(name + suffix for suffix in _BESIDE), state_name)
    return FoundWeight(name, shape, dtype, "nf4", parts, {"mean": torch.tensor(mean, dtype=torch.float32)}, beside)
