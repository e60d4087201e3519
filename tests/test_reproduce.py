"""tools/reproduce.py: scripts accept each command of rows.toml; the documents are up to date."""

import importlib
import shlex

import pytest

from tools import reproduce, tables
from tools.tables import BACKBONES, MEASURES, ROWS, TABLES

KNOWN = {*BACKBONES, *ROWS["files"]}


def planned(*flags):
    """-> the commands of all tables, [(module, its flags)]"""
    args = reproduce.get_args(["--dry-run", *flags, *TABLES])
    if args.quick:
        args.captions, args.processes = "--data shapes", 1
    steps = reproduce.Steps(args)
    for name in TABLES:
        steps.table(name)
    commands = []
    for command in map(shlex.split, steps.commands):
        script, *flags = command[2:] if command[1].startswith(("-m", "--nproc")) else command[1:]
        if script == "-m":
            script, *flags = flags
        commands.append((script.removesuffix(".py").replace("/", "."), flags))
    return commands


@pytest.mark.parametrize("flags", [(), ("--quick",), ("--processes", "8", "--seeds", "2")])
def test_commands(flags):
    """All of them are parsed by their scripts."""
    commands = planned(*flags)
    outputs = [own[own.index("--output") + 1] for _, own in commands]
    assert len(set(outputs)) == len(commands) > 350
    for module, own in commands:
        importlib.import_module(module).get_args(own)


def test_plan(tmp_path):
    """--dry-run names what is missing, marks what cannot be pasted, and says how long it takes."""
    (tmp_path / "photos.jsonl").write_text(6400 * "{}\n")
    commands = [
        f"python tp.py --data {tmp_path}/photos.jsonl --init runs/papers/a/backbone.pth",
        "torchrun --nproc_per_node=8 virtex.py --data coco --root gone --iters 360000",
        "python -m downstream.finetune --data folder --root gone --weights a/model_N.pth",
        "python -m downstream.detection --data coco --root gone",
    ]
    missing, weights, *lines = tables.plan(commands, "runs/papers", 256)
    assert missing == "# missing, for 3 commands: gone"
    assert weights == "# missing, for 1 commands: a/model_N.pth"
    assert lines[0].endswith("/backbone.pth  # 5,000 iterations of 32 images, 0.2 hours")
    assert lines[1].endswith("--iters 360000  # 360,000 iterations of 256 images, 100.0 hours")
    selected = "N: of the model that the validation selects"
    assert lines[2].endswith(f"N.pth  # 100 passes over the images in batches of 256, {selected}")
    assert lines[3].endswith("  # 180,000 iterations of 16 images")
    assert lines[4].startswith("# 4 commands, 100.2 hours of training at 256 images/s")


def test_rows():
    """A number or a reason for each cell, names that exist, nothing that no table uses"""
    used = {ROWS["select"]}
    for name, table in TABLES.items():
        assert table.get("rows") or table["note"]
        for label, backbone, *cells in table.get("rows", []):
            assert backbone in KNOWN and len(cells) in (0, len(table["columns"])), (name, label)
            used.add(backbone)
            for column, cell in zip(table["columns"], cells):
                paper, _, other = str(cell).partition(" by ")
                used |= {column, other or column}
                if paper not in ("", "-", "figure"):
                    numbers = [float(number) for number in paper.split(" / ")]
                    assert len(numbers) == len(MEASURES[other or column]["scores"]), (name, label)
        used |= set(table.get("columns", []))
    used |= {measure.get("of") for measure in MEASURES.values()}
    started = " ".join(str(command) for command in BACKBONES.values())
    unused = {name for name in (KNOWN | MEASURES.keys()) - used if f"{{{name}}}" not in started}
    assert not unused and ROWS["draws"].keys() <= BACKBONES.keys()


def test_documents():
    """Written by python tools/reproduce.py --docs"""
    texts = tables.documents(lambda: reproduce.Steps(reproduce.get_args(["--dry-run"])))
    for name, text in texts.items():
        assert (tables.REPO / name).read_text() == text, "run python tools/reproduce.py --docs"
