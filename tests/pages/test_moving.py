"""The scripts of the pages "from other libraries": both sides train on the same numbers, and the pages show these files."""

import difflib
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

from shardwise.dialects.answers import imported
from shardwise.run.config import RunConfig, load_config
from shardwise.techniques.lora.options import LoRA

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("plain", "accelerate", "trainer", "fabric", "fsdp2", "torchtune")
ALONE = ("plain", "nanogpt", "peft", "qlora")  # their scripts are for one process


def program(folder: str, name: str):
    """A new module of ``benchmarks/NAME.py`` or ``tools/NAME.py``, or the one that is loaded."""
    if f"{name}_of_pages" not in sys.modules:
        spec = importlib.util.spec_from_file_location(f"{name}_of_pages", ROOT / folder / f"{name}.py")
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[f"{name}_of_pages"]


moving = program("benchmarks", "moving")


def of_trl():
    """Script of ours -> losses of TRL that docs/adapters.md records, from the same adapters."""
    table = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8").partition("<!-- trl -->")[2].splitlines()
    rows = {label: row for label in moving.TRL for row in table if row.startswith(f"| {label} |")}
    lora, _, qlora, *_ = ([float(cell) for cell in rows[label].split("|")[2:-1]] for label in moving.TRL)
    return {"peft": lora, "qlora": qlora}


def run(pool):
    return lambda fn, ranks, *args: pool.run(fn, ranks, *args, timeout_s=100)


@pytest.mark.quick("accelerate", "fsdp2", "trainer", "plain", "peft")
@pytest.mark.parametrize("name", ["plain", "nanogpt", "peft", "qlora", *moving.NAMES])
def test_both_scripts_have_the_same_losses_and_weights(ranks, name):
    if name in ("peft", "qlora"):
        pytest.importorskip("peft")
    if name == "qlora":
        pytest.importorskip("bitsandbytes")
    before = run(ranks)(moving.run_script, 1 if name in ALONE else 2, f"{name}_before")[0]
    after, recorded = run(ranks)(moving.run_script, 2, f"{name}_after")[0], of_trl()
    assert len(before[0]) == (8 if name == "nanogpt" else 6) and before[0][0] > 3  # steps, and validations
    tolerance = (
        1e-5 if name in ("trainer", "peft", "qlora") else 1e-9
    )  # the loss of transformers is float32 in a float64 model too
    assert after[0] == pytest.approx(before[0], rel=0, abs=tolerance)
    assert moving.distance(before, after) < tolerance
    if name in recorded:
        assert after[0] == pytest.approx(recorded[name], rel=0, abs=3e-6)
    if name in ALONE:  # its steps have as many micro-batches on any number of ranks
        alone = run(ranks)(moving.run_script, 1, f"{name}_after")[0]
        assert alone[0] == pytest.approx(after[0], rel=0, abs=1e-5 if name == "qlora" else 1e-9)  # it is in float32


def test_with_uneven_labels_the_page_shows_whose_average_differs(ranks):
    rows = moving.uneven_rows(run(ranks))
    assert moving.uneven_table(rows) in (ROOT / "docs" / "moving.md").read_text(encoding="utf-8")
    apart = {name: (losses, weights) for name, (_, losses, weights) in rows.items()}
    assert all(max(found) < 1e-9 for name, found in apart.items() if "Shardwise" in name)
    theirs = {name for name, found in apart.items() if min(found) > 1e-3}
    assert {name.partition(":")[0] for name in theirs} == {"accelerate", "Fabric", "FSDP2 by hand"}


def test_with_an_uneven_epoch_the_page_shows_whose_samples_are_repeated(ranks):
    assert moving.sample_table(run(ranks)) in (ROOT / "docs" / "moving.md").read_text(encoding="utf-8")


def test_pages_show_the_files_as_they_are(capsys):
    assert program("tools", "shown_files").main(["--check"]) == 0, capsys.readouterr().err
    text = "".join((ROOT / "docs" / f"from-{name}.md").read_text(encoding="utf-8") for name in PAGES)
    text += "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("adapters.md", "quantize.md"))
    shown = re.findall(r"examples/from/\w+\.(?:py|yaml)", " ".join(re.findall(r"<!-- (?:file|diff): (.*) -->", text)))
    parts = (*(ROOT / "examples" / "from").glob("*_before.*"), *(ROOT / "examples" / "from").glob("*_after.*"))
    files = {f"examples/from/{path.name}" for path in parts}
    assert set(shown) == files


def test_a_block_that_is_not_the_file_is_found():
    shown_files = program("tools", "shown_files")
    page = "<!-- file: examples/from/tiny.py -->\n```python\nold\n```\nrest\n"
    assert shown_files.filled(page) != page
    assert shown_files.filled(page).endswith("```\nrest\n")
    assert shown_files.filled(shown_files.filled(page)) == shown_files.filled(page)


def test_a_script_like_nanogpts_gets_twelve_new_lines():
    before, after = (
        (ROOT / "examples" / "from" / f"nanogpt_{end}.py").read_text().splitlines() for end in ("before", "after")
    )
    added = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 12, added


def test_scripts_are_short():
    for path in (ROOT / "examples" / "from").glob("*.py"):
        most = 80 if path.name.startswith("nanogpt") else 60  # it evaluates, too
        assert len(path.read_text(encoding="utf-8").splitlines()) < most, path


def keys(config, prefix=""):
    for name in config.__struct_fields__:
        value = getattr(config, name)
        yield f"{prefix}{name}"
        if hasattr(value, "__struct_fields__"):
            yield from keys(value, f"{prefix}{name}.")


def test_keys_that_the_pages_name_exist():
    sections = RunConfig.__struct_fields__
    known = {*keys(load_config(None).config)}
    known |= {f"parallel.lora.{name}" for name in LoRA.__struct_fields__} | {"parallel.lora"}
    known |= {f"parallel.{name}" for name in ("remat.mode", "remat.offload", "precision.storage")}
    text = "".join((ROOT / "docs" / f"from-{name}.md").read_text(encoding="utf-8") for name in ("trainer", "torchtune"))
    # the columns that say what to write here: all but the first
    cells = [cell for row in re.findall(r"^\|(.*)\|$", text, re.MULTILINE) for cell in row.split(" | ")[1:]]
    named = {word for cell in cells for word in re.findall(rf"`((?:{'|'.join(sections)})\.[\w.]+)(?:=[^`]*)?`", cell)}
    assert len(named) > 40
    assert named <= known


def test_the_lora_recipe_of_torchtune_is_imported_as_the_page_shows():
    folder = ROOT / "examples" / "from"
    theirs, ours = (yaml.safe_load((folder / f"torchtunelora_{end}.yaml").read_text()) for end in ("before", "after"))
    assert imported(theirs, dialect="torchtune", ranks=2).run == ours
    assert load_config(folder / "torchtunelora_after.yaml").config.parallel.lora.rank == theirs["model"]["lora_rank"]


def test_the_configuration_that_stands_for_a_torchtune_recipe_is_read():
    loaded = load_config(ROOT / "examples" / "from" / "torchtune_after.yaml")
    assert loaded.config.parallel.precision == "bf16" and loaded.config.train.fused is True
