"""The private names of torch that are used: each has a probe, which finds it on this torch and says so where it is gone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise._torch import probes

FOLDER = Path(shardwise.__file__).parent / "_torch"


def used():
    """Private names in the files of ``_torch``: of torch's modules, and of attributes that the file itself does not make."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {
            target.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for outer in (node.targets if isinstance(node, ast.Assign) else [node.target])
            for target in (outer.elts if isinstance(outer, ast.Tuple) else [outer])
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
        }
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [alias.name for alias in node.names if alias.name.startswith("_")]
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                names = [node.attr] if node.attr not in own else []
            found |= dict.fromkeys(names, path.name)
    return found


PROBED = {name for probe in probes.PROBES for name in (*probe.attributes, *probe.words)}
PLACES = {part for probe in probes.PROBES for part in probe.place.replace(":", ".").split(".")}
NOT_OF_TORCH = {"_tensor", "_dim", "_num", "_size", "_state"}  # of classes here, set in __init__ by a tuple
OF_OPERATORS = {"_local_scalar_dense", "_to_copy"}  # torch.ops.aten: part of what a graph is written in


def test_every_private_name_has_a_probe():
    found = used()
    assert len(found) > 40
    assert {n: f for n, f in found.items() if n not in PROBED | PLACES | NOT_OF_TORCH | OF_OPERATORS} == {}


@pytest.mark.parametrize(
    "probe", probes.PROBES, ids=lambda probe: f"{probe.place.rpartition('.')[2]} {len(probe.words)}"
)
def test_it_is_there(probe):
    assert probe.missing() == [] or probe.without


def test_what_is_gone_is_named(monkeypatch):
    assert probes.missing() == []
    gone = probes.Probe("torch", ("_foreach_norm", "_foreach_none"), words=("no such word",))
    assert gone.missing() == ["torch._foreach_none", "torch: no such word"]
    assert probes.Probe("torch.nosuch:X", ("a",)).missing() == ["torch.nosuch:X"]
    monkeypatch.setattr(probes, "PROBES", (gone, probes.Probe("torch", ("_none",), without="another way")))
    assert probes.missing() == ["torch._foreach_none", "torch: no such word"]


GONE = """
import sys, torch
del torch.nn.modules.batchnorm._NormBase
import shardwise as sw
try:
    sw.parallelize
except sw.UnsupportedError as error:
    print(error)
"""


def test_a_torch_without_one_of_them_is_refused_by_version():
    done = subprocess.run([sys.executable, "-c", GONE], capture_output=True, text=True, timeout=60)
    assert f"torch {torch.__version__}\n  why: something that Shardwise uses of it is not there" in done.stdout, (
        done.stderr
    )
    assert "_NormBase" in done.stdout
