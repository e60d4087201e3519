"""tools/reproduce.py: scripts accept each command of docs/papers.md, whose tables are sound."""

import importlib
import json
import re
import shlex

import pytest
from tools import reproduce
from tools.reproduce import Steps

EVALUATION = reproduce.REPO / "docs/evaluation.md"
RUNS, MEASURES, TABLES = reproduce.read_page({"flowers": "data/flowers", "textures": "textures"})
GIVEN = "--dry-run --labelled data/flowers textures --minilm bert --clip clip".split()
GIVEN += "--imagenet imagenet --words words.jsonl".split()


def steps_of(*flags):
    steps = Steps(reproduce.get_args([*TABLES, *GIVEN, *flags]))
    for title in TABLES:
        steps.table(title)
    return steps


@pytest.mark.parametrize("flags", ["", "--processes 8 --seeds 2"])
def test_commands(flags):
    """Those of all tables are parsed by their scripts; no two write into one folder."""
    commands = steps_of(*flags.split()).commands
    outputs = {command.partition(" --output ")[2] for command in commands}
    assert len(outputs) == len(commands) > 560
    for command in commands:
        script, *own = shlex.split(re.sub(r"^(python|torchrun \S+) (-m )?", "", command))
        importlib.import_module(script.removesuffix(".py").replace("/", ".")).get_args(own)


def test_recipes():
    """The commands on docs/evaluation.md are those of the rows that it names."""
    commands = {*steps_of().commands}
    blocks = re.findall(r"^```sh\n(.*?)^```", EVALUATION.read_text(), re.S | re.M)
    lines = re.sub(r"\s*\\\n\s*", " ", "".join(blocks)).splitlines()
    examples = {line for line in lines if re.search("--output runs/papers/(?!NAME)", line)}
    assert len(examples) == 11 and examples <= commands


def test_rows():
    """Runs and measures exist and are used; a cell has a number for each score."""
    used = {"voc07-val"}
    for title, (names, *rows) in TABLES.items():
        for label, run, *cells in rows:
            assert run == "-" or run.replace("{set}", "flowers") in RUNS, (title, label)
            assert len(cells) == len(names) - 2, (title, label)
            for name, cell in zip(names[2:], cells):
                paper, _, other = cell.strip(")").partition(" (")
                measure = (other or name).replace("{set}", "flowers")
                used.add(measure)
                if paper not in ("", "-", "figure"):
                    assert len(paper.split(" / ")) == len(MEASURES[measure][2].split(" / ")), label
    assert {name for name in MEASURES if "textures" not in name} == used


def test_photos_seen():
    """Each row of "own photos" sees as many; a row that starts from TP counts TP's, too."""
    steps = Steps(reproduce.get_args(["own photos:", *GIVEN]))
    steps.table([title for title in TABLES if title.startswith("own photos:")][0])
    seen = {}
    for command in steps.commands:
        given = dict(re.findall(r"--(\S+) (\S+)", command))
        if "iters" in given:
            start = given.get("init", "").removesuffix("/backbone.pth")
            seen[given["output"]] = 64 * int(given["iters"]) + seen.get(start, 0)
    assert seen.pop("runs/papers/own-tp-half") == 50_048
    assert seen.pop("runs/papers/own-lm") == 64  # its language model is what the others want
    assert {*seen.values()} == {100_096}


def test_selection(tmp_path):
    """Early stopping takes the best kept model."""
    name = f"{tmp_path}/virtex/model_{{}}.pth"
    scores = {name.format(n): {"mean": {"mAP": mAP}} for n, mAP in ((5, 70.0), (10, 60.0))}
    write(tmp_path / "virtex", {})
    write(tmp_path / "virtex/voc07-val", {"backbones": scores})
    for path in scores:
        open(path, "w").write(path)
    steps = Steps(reproduce.get_args(["VirTex", "--output", f"{tmp_path}"]))
    _, best = steps.train("virtex", 0)
    assert best.read_text().endswith("model_5.pth")


def test_mean_of_sets(tmp_path):
    """README's first score"""
    sets = [tmp_path / name for name in "abc"]
    flags = "own photos", "--labelled", *map(str, sets), "--output", f"{tmp_path}"
    weights = f"{tmp_path}/own-tp/backbone.pth"
    write(tmp_path / "own-tp", {})
    for folder, mAP in zip(sets, (10.0, 20.0, 60.0)):
        scores = {"backbones": {weights: {"mean": {"mAP": mAP}}}}
        write(tmp_path / f"own-tp/own-map-{folder.name}", scores)
    steps = Steps(reproduce.get_args(flags))
    assert steps.scores("own-mean", "own-tp", 0) == [30.0] and not steps.commands


def test_records(tmp_path, monkeypatch):
    """A score names its steps; a step its command, and when, where and for how long it ran."""
    steps = Steps(reproduce.get_args(["scenes:", "--output", f"{tmp_path}", "--iters", "3"]))
    scores = {str(tmp_path / "scenes-tp/backbone.pth"): {"mean": {"mAP": 50.0}}}
    (tmp_path / "result").write_text(json.dumps({"backbones": scores}))
    copy = "mkdir -p {0}; cp %s {0}/result.json; echo" % (tmp_path / "result")
    outputs = [tmp_path / "scenes-tp", tmp_path / "scenes-tp/scenes-map"]
    for output in outputs:
        assert steps.start(copy.format(output), output) is None
    cell = steps.cell("scenes-map", "-", "scenes-tp")
    assert cell["ours"] == [[50.0]] and cell["steps"] == [[str(output) for output in outputs]]
    [start] = reproduce.record(outputs[0])["starts"]
    assert start["seconds"] is not None and start["torch"] and "cores of" in start["machine"]
    reproduce.write_table("scenes: ...", {"scenes-map": "mAP"}, [
        {"row": "TP", "run": "scenes-tp", "cells": {"scenes-map": cell}}], tmp_path / "tables")
    table = json.loads((tmp_path / "tables/scenes.json").read_text())
    assert table["steps"][str(outputs[1])]["command"].startswith("mkdir")
    assert steps.start("exit 3; echo", tmp_path / "failing").startswith("failed: see")


def write(folder, result):
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))
