"""Opens the weights in a checkpoint as a source, with their checksums: those of the model, or of a further model in
it."""

from dataclasses import replace
from pathlib import Path

from shardwise.state.formats import open_folder, open_safetensors
from shardwise.state.integrity.manifest import MANIFEST, Manifest, folder_name, is_manifest, step_of, steps_in
from shardwise.state.integrity.reading import VerifiedCheckpoint, VerifiedFiles
from shardwise.state.stored import Source

_RUN, _FURTHER = "training", "extra"  # folders of a checkpoint


def home_of(path: Path) -> Path | None:
    """The checkpoint that ``path`` is, or whose weights it is; None: there is none, not even a damaged one."""
    folder = path if path.is_dir() else path.parent
    for home in (folder, folder.parents[1] if folder.parent.name == _FURTHER else folder):
        named = step_of(home) is not None and (home / MANIFEST).exists()
        if named or is_manifest(home / MANIFEST) or (home / _RUN / "state.json").exists():
            return home
    return None


def newest_in(path: Path) -> Path | None:
    """The newest checkpoint in a run's directory of checkpoints, by step; None: there is none."""
    steps = steps_in(path)
    return path / folder_name(steps[-1]) if steps else None


def open_weights(path: Path, home: Path) -> Source:
    """Opens weights in a checkpoint; their headers and the files next to them have been compared with their checksums.

    Args:
        path: a directory or a file of weights.
        home: of the checkpoint.

    Raises:
        CheckpointError: it is not complete, or fails its checksums.
    """
    path, home = path.resolve(), home.resolve()  # `latest` may soon point elsewhere
    verified = VerifiedCheckpoint(home, Manifest.read(home))
    names = verified.manifest.files
    if path.is_file():
        checked, rest = [path.relative_to(home).as_posix()], {}
    else:
        beside = {name for name in names if (home / name).parent == path}
        checked = sorted(beside)
        rest = _left_out(verified) if path == home else {}
    with VerifiedFiles(verified) as files:
        files.check_heads(checked)
    source = open_safetensors(path) if path.is_file() else open_folder(path)
    return replace(source, kind="a checkpoint", left_out={**source.left_out, **rest}, verified=verified)


def _left_out(verified: VerifiedCheckpoint) -> dict[str, str]:
    tops = {tuple(name.split("/")[:2]) for name in verified.manifest.files if "/" in name}
    found = {}
    if any(top == _RUN for top, _ in tops):
        found[_RUN] = "training state is not a weight"
    found |= {
        f"{top}/{name}": f"weights of another model: name {verified.folder / top / name} to have them"
        for top, name in sorted(tops)
        if top == _FURTHER
    }
    return found
