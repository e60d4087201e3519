"""The house (DESIGN Sec. 2): width of lines, who imports whom, and --help without what is slow."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS, environment

PATTERNS = "*.py", "tests/*.py", "tools/*.py", "downstream/*.py", "README.md", "docs/*.md"
FILES = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
OURS = {path.stem for path in ROOT.glob("*.py")} | {"downstream", "tools", "tests"}

# What of ours a file may import at its top.
ALLOWED = {
    "shapes": set(),
    "common": set(),
    "sources": {"common", "shapes"},
    "pictures": {"common"},
    "language": {"common"},
    "eval_linear": {"common"},
    **dict.fromkeys(SCRIPTS, {"common", "language", "eval_linear"}),
    # detection.py its boxes.py, retrieval.py the measures of mmcontrastive.py
    "downstream": {"common", "eval_linear", "pictures", "mmcontrastive", "downstream"},
}
# Within functions: what only some runs need.
LATER = {
    "shapes": set(),
    "common": {"sources"},
    "eval_linear": {"sources"},
    **dict.fromkeys(SCRIPTS, {"pictures", "shapes", "sources"}),
    "downstream": {"shapes", "language"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_width(path):
    """No line is wider than 100 columns."""
    lines = enumerate(path.read_text().splitlines(), 1)
    assert [number for number, line in lines if len(line) > 100] == []


def imported(tree, inside):
    """The modules of ours that a file imports at its top (also in a try), or inside functions."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        function = isinstance(node, (ast.FunctionDef, ast.Lambda))
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0] if node.level == 0 else "downstream")
        elif inside or not function:
            found |= imported(node, inside)
    return found & OURS


PRODUCT = [p for p in FILES if p.suffix == ".py" and p.parent.name not in ("tests", "tools")]


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.stem)
def test_imports(path):
    """They go one way and make no circle; functions import what only some runs need (LATER)."""
    name, tree = path.stem if path.parent == ROOT else path.parent.name, ast.parse(path.read_text())
    assert name in ALLOWED, f"{path} is no part of the house"
    assert imported(tree, inside=False) <= ALLOWED[name]
    assert imported(tree, inside=True) <= ALLOWED[name] | LATER.get(name, set())


HELP = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as ended:
        slow = {"transformers", "sklearn", "torchvision", "pycocotools"} & set(sys.modules)
        print(name, ended.code, sorted(slow), file=sys.stderr)
"""


def test_help_is_quick():
    """It ends well and has not waited for the libraries that take seconds."""
    downstream = "detection", "finetune", "retrieval", "tagging", "zeroshot"
    scripts = [*SCRIPTS, "eval_linear", *(f"downstream.{name}" for name in downstream)]
    command = [sys.executable, "-c", HELP, *scripts]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "env": environment()}
    ended = subprocess.run(command, **options)
    assert ended.stdout.count("usage: ") == len(scripts)
    assert ended.stderr.splitlines() == [f"{script} 0 []" for script in scripts]
