"""The dtype of the weights that a run starts from: refused before any rank starts where it would be rounded, and kept for
the final weights. Torch-free: only the headers of safetensors files are read."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwise.config.dtype_words import DTYPE_WORDS
from shardwise.config.tokenizer import is_in_4_bits, read_json
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig
from shardwise.techniques.precision.options import precision_of

_WORDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_WIDER = {"bfloat16": {"float32", "float64"}, "float16": {"float32", "float64"}, "float32": {"float64"}}
_DEQUANTISED = {
    "fp8": "FineGrainedFP8Config",
    "mxfp4": "Mxfp4Config",
}  # of transformers, which can write plain weights of these
_LONGEST = 100 << 20  # bytes of a header, as the format allows


def check_stored_dtype(config: RunConfig, origins: Mapping[str, str]) -> None:
    """Refuses ``model.hf`` whose weights would be rounded where the run stores them, unless ``model.cast`` allows it. What
    may change that (transforms, renamed tensors, parts with a precision of their own) is left to the ranks."""
    model, parallel = config.model, config.parallel
    for key, folder in (("hf", model.hf), ("weights", model.weights)):
        if folder is not None and is_in_4_bits(folder):
            if parallel.quantize is None:
                raise ConfigError(
                    f"model.{key}={folder!r} ({origins[f'model.{key}']}): its weights are in 4 bits",
                    why="they can stay so, frozen, with adapters beside them; or be unpacked, and trained",
                    fix="train adapters: --parallel.lora.rank=16; or unpack them: --parallel.quantize=none",
                )
        elif folder is not None:
            _refuse_quantised(Path(folder), f"model.{key}={folder!r} ({origins[f'model.{key}']})")
    precision = precision_of(parallel.precision)
    if model.hf is None or model.weights not in (None, model.hf) or model.rename or parallel.transforms:
        return
    if model.cast or precision.parts:
        return
    found = set() if is_in_4_bits(model.hf) else dtypes_in(Path(model.hf))
    storage, names = precision.storage or "float32", {_WORDS.get(dtype, "") for dtype in found}
    if not found or "" in names or (precision.storage is None and model.cast is None):
        return  # without a storage it is the model's own, which only the ranks know
    taken = {storage} if model.cast is False else {name for name in names if storage in {name, *_WIDER.get(name, ())}}
    if names <= taken:
        return
    name, is_rounded = " and ".join(sorted(names)), model.cast is None
    raise ConfigError(
        f"model.hf={model.hf!r} ({origins['model.hf']}): its weights are {name}",
        why=f"parallel.precision stores {storage}, in which they would be rounded"
        if is_rounded
        else f"the run stores {storage}, and model.cast=false refuses any other dtype",
        fix="store them as they are: --parallel.precision=bf16 computes in bfloat16 and stores float32; or round them: --model.cast=true"
        if is_rounded
        else "remove model.cast: what loses nothing is then converted",
    )


def _refuse_quantised(folder: Path, given: str) -> None:
    """Refuses a directory whose weights are packed numbers beside their scales: a run would take them for plain ones."""
    settings = read_json(folder / "config.json").get("quantization_config")
    if not isinstance(settings, dict):
        return
    method = str(settings.get("quant_method", "an unknown method"))
    maker = _DEQUANTISED.get(method)
    raise ConfigError(
        f"{given}: its weights are quantised",
        why=f"quantization_config in its config.json names {method}: small numbers beside their scales, which no cast makes weights",
        fix="train a directory of the model with plain weights, which its publisher may have"
        + (
            f"; or make one by transformers: AutoModelForCausalLM.from_pretrained({str(folder)!r}, quantization_config=transformers.{maker}"
            f"(dequantize=True), dtype=torch.bfloat16).save_pretrained({str(folder) + '-bf16'!r})"
            if maker
            else ""
        ),
    )


def export_dtype(config: RunConfig) -> str | None:
    """The dtype in which a run writes its final weights: ``checkpoint.dtype``, or else that of the directory it started from,
    if all of it has one; None: as they are stored."""
    if config.checkpoint.dtype is not None:
        return DTYPE_WORDS[config.checkpoint.dtype]
    found = dtypes_in(Path(config.model.start)) if config.model.start is not None else set()
    return _WORDS.get(found.pop()) if len(found) == 1 else None


def dtypes_in(folder: Path) -> set[str]:
    """The dtypes of floating tensors in the safetensors files of a directory, or in one file, in the format's words; what
    cannot be read is left out."""
    dtypes = {dtype for _, dtype, _ in stored_tensors(folder)}
    return {dtype for dtype in dtypes if dtype[:1] in ("F", "B") and dtype != "BOOL"}


def stored_tensors(folder: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype (the format's word) and shape of the tensors in the safetensors files of a directory, or in one file; what cannot
    be read is left out."""
    files = [folder] if folder.suffix == ".safetensors" and folder.is_file() else sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size)) if size <= _LONGEST else {}
        except (OSError, ValueError):
            continue
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, entry.get("dtype", ""), entry.get("shape", [])
