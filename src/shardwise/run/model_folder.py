"""Finds the model in a folder: a Hugging Face directory, or the folder of a run, and which tokenizer its tokens are of.
Torch-free."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.config.tokenizer import is_tokens, template_in, tokenizer_files, tokenizer_path
from shardwise.errors import ConfigError
from shardwise.run.config import RunConfig, load_config

CONFIG = "config.json"
RUN = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A model on disk.

    Attributes:
        weights: the folder of its weights.
        run: the configuration of the run that wrote them, if it is known.
        is_hf: the folder says how the model is built; otherwise it is the reference model, of the sizes in ``run``.
        tokenizer: the folder, or ``tokenizer.json``, of its tokenizer; "bytes": the tokens are the bytes of a text.
    """

    weights: Path
    run: RunConfig | None
    is_hf: bool
    tokenizer: Path | Literal["bytes"]


def find_model(given: str) -> ModelFolder:
    """Finds the model in ``given``: a model directory, the folder of a run, or that of its final weights or a checkpoint."""
    folder = Path(given)
    if not folder.is_dir():
        raise ConfigError(
            given,
            why="it is a file, and a model is a directory"
            if folder.exists()
            else f"there is no such directory (relative to {Path.cwd()})",
            fix="give a model directory, such as runs/latest/weights, or the folder of a run: runs/latest",
        )
    run = _run_in(folder)
    weights = folder
    if not (folder / CONFIG).is_file() and run is not None:
        weights = folder / (run.checkpoint.export or "weights")
        if not weights.is_dir():
            raise ConfigError(
                f"{given}: the folder of a run",
                why=f"its final weights are not there ({weights})",
                fix="let the run end"
                + (
                    f"; or give a checkpoint: {newest}"
                    if (newest := folder / "checkpoints" / "latest").exists()
                    else ""
                ),
            )
    # Such as runs/latest/checkpoints/step-00000100.
    run = run or _run_in(folder.absolute().parent) or _run_in(folder.absolute().parent.parent)
    is_hf = (weights / CONFIG).is_file()
    if not is_hf:
        _refuse_no_model(given, weights, run)
    return ModelFolder(weights=weights, run=run, is_hf=is_hf, tokenizer=_tokenizer_of(given, weights, run, is_hf=is_hf))


def _run_in(folder: Path) -> RunConfig | None:
    """The configuration of the run whose folder this is; None: it is that of no run."""
    return load_config(folder / RUN).config if (folder / RUN).is_file() else None


def _refuse_no_model(given: str, weights: Path, run: RunConfig | None) -> None:
    if not any(weights.glob("*.safetensors")):
        raise ConfigError(
            given,
            why=f"there is no model in it: neither {CONFIG} nor weights",
            fix="give a directory that save_pretrained has written, or the folder of a run",
        )
    if run is None or run.model.build is not None:
        what = f"the model is built by {run.model.build}" if run is not None else f"there is no {CONFIG}"
        raise ConfigError(
            f"{given}: weights of a model of your own code",
            why=f"{what}, and nothing says how it is called to generate a text",
            fix="load them in Python: module.load_state_dict(safetensors.torch.load_file(...)), or sw.load_weights(model, "
            f"{str(weights)!r})",
        )


def _tokenizer_of(given: str, weights: Path, run: RunConfig | None, *, is_hf: bool) -> Path | Literal["bytes"]:
    if tokenizer_files(weights):
        return weights
    data = run.data if run is not None else None
    if data is not None and data.build is None and not is_tokens(data.path):
        found = tokenizer_path(data.tokenizer)
        return "bytes" if found is None else found.parent if is_hf else found
    raise ConfigError(
        f"{given}: a model without a tokenizer",
        why="nothing says which tokens a text becomes",
        fix=f"save its tokenizer there: tokenizer.save_pretrained({str(weights)!r})",
    )


def has_template(tokenizer: Path | Literal["bytes"]) -> bool:
    if tokenizer == "bytes":
        return False
    return template_in(tokenizer if tokenizer.is_dir() else tokenizer.parent) is not None
