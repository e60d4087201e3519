"""tools/reproduce.py: scripts accept each command of rows.toml; the documents are up to date."""

import importlib
import json
import re
import shlex
import subprocess

import pytest

from tools import documents, reproduce, sizes, tables
from tools.steps import Steps
from tools.tables import BACKBONES, MEASURES, ROWS, TABLES

NO_TAGS = "--small --photos docs/logs/tp/metrics.jsonl"  # any lines without "tags"


@pytest.mark.parametrize("flags", ["", "--quick", "--processes 8 --seeds 2", "--small", NO_TAGS])
def test_commands(flags):
    """Those of all tables are parsed by their scripts."""
    args = reproduce.get_args(["--dry-run", *flags.split(), *TABLES])
    args.captions = "--data shapes"  # for --quick
    steps = Steps(args)
    for name in TABLES:
        steps.table(name)
    outputs = {command.partition(" --output ")[2] for command in steps.commands}
    assert len(outputs) == len(steps.commands) > (150 if args.small else 350)
    for command in steps.commands:
        script, *own = shlex.split(re.sub(r"^(python|torchrun \S+) (-m )?", "", command))
        importlib.import_module(script.removesuffix(".py").replace("/", ".")).get_args(own)


def test_race():
    """Each row of "own photos" sees as many photos, and is measured on each labelled folder."""
    flags = "--dry-run --seeds 2 --minilm bert --imagenet --clip c --labelled a b".split()
    steps = Steps(reproduce.get_args(["own photos", *flags]))
    rows = steps.table("own photos")
    seen, start = {}, {}
    for command in steps.commands:
        script, *own = shlex.split(command.removeprefix("python "))
        given = dict(zip(own, own[1:]))
        if "--iters" in own:
            _, seen[given["--output"]] = tables.length([script, *own])
            start[given["--output"]] = given.get("--init", "").removesuffix("/backbone.pth")
    for run in seen:
        total = seen[run] + seen.get(start[run], 0)
        assert total == (75_008 if "half" in run else 150_016), run
    assert "runs/papers/own-supervised-b-1" in seen and "runs/papers/own-virtex-in-1" not in seen
    columns = ["own-map-a", "own-map-b", "own-mean", "own-knn-a", "own-knn-b"]
    assert all([*row["cells"]][:5] == columns for row in rows)
    assert all(len(row["steps"]) > 5 for row in rows)


def test_selection(tmp_path):
    """Early stopping takes the best kept model, also by the scores of a folder that has moved."""
    (tmp_path / "virtex/voc07-val").mkdir(parents=True)
    for name in ("result.json", "model_5.pth", "model_10.pth"):
        (tmp_path / "virtex" / name).write_text("{}")
    scores = {f"old/model_{n}.pth": {"mean": {"mAP": mAP}} for n, mAP in ((5, 70.0), (10, 60.0))}
    (tmp_path / "virtex/voc07-val/result.json").write_text(json.dumps({"backbones": scores}))
    steps = Steps(reproduce.get_args(["--output", str(tmp_path)]))
    assert steps.weights("virtex", 0) == f"{tmp_path}/virtex/model_5.pth"


def test_plan(tmp_path):
    """--dry-run names what is missing, marks what cannot be pasted, and says how long it takes."""
    (tmp_path / "photos.jsonl").write_text(6400 * "{}\n")
    selected = "N: of the model that the validation selects"
    commands = {
        f"python tp.py --data {tmp_path}/photos.jsonl --init runs/papers/a/backbone.pth":
            "5,000 iterations of 32 images, 0.2 hours",
        "torchrun --nproc_per_node=8 virtex.py --data coco --root gone --iters 360000":
            "360,000 iterations of 256 images, 100.0 hours",
        "python -m downstream.finetune --data folder --root gone --weights a/model_N.pth":
            f"100 passes over the images in batches of 256, {selected}",
        "python -m downstream.detection --data coco --root gone": "180,000 iterations of 16 images",
    }  # fmt: skip
    missing, weights, *lines, total = tables.plan(list(commands), "runs/papers", 256)
    assert missing == "# missing, for 3 commands: gone"
    assert weights == "# missing, for 1 commands: a/model_N.pth"
    assert lines == [f"{command}  # {note}" for command, note in commands.items()]
    assert total.startswith("# 4 commands, 100.2 hours of training at 256 images/s")


def test_rows():
    """A number or a reason for each cell, names that exist, nothing that no table uses"""
    used, known = {ROWS["select"]}, {*BACKBONES, *ROWS["files"]}
    for name, table in TABLES.items():
        assert table.get("rows") or table["note"]
        for label, backbone, *cells in table.get("rows", []):
            assert backbone in known and len(cells) in (0, len(table["columns"])), (name, label)
            used |= {backbone, *table["columns"]}
            for column, cell in zip(table["columns"], cells):
                paper, _, other = str(cell).partition(" by ")
                used.add(other or column)
                if paper not in ("", "-", "figure"):
                    numbers = [float(number) for number in paper.split(" / ")]
                    assert len(numbers) == len(MEASURES[other or column]["scores"]), (name, label)
    used |= {measure.get(key) for measure in MEASURES.values() for key in ("of", "mean")}
    used |= {*ROWS["small"]["probe"]}
    started = " ".join(str(command) for command in BACKBONES.values())
    unused = {name for name in (known | MEASURES.keys()) - used if f"{{{name}}}" not in started}
    assert not unused and ROWS["draws"].keys() <= BACKBONES.keys()
    *_, small = sizes.at_small_size(reproduce.get_args(["--small"]))
    assert ["VirTex", "virtex", "88.7 by scenes-probe"] in small["VirTex Tab. 2"]["rows"]


def test_tables_of_the_pages():
    """They are what reproduce.py --docs writes of docs/logs."""
    for name, text in documents.documents().items():
        assert documents.read(name) == text, "run python tools/reproduce.py --docs"


@pytest.mark.parametrize("page, quote", documents.quotes())
def test_quotes(page, quote):
    """The sentences of tools/quotes.toml, with the numbers of docs/logs, are on their pages."""
    assert quote in " ".join(documents.read(page).split())


@pytest.mark.parametrize("page", documents.PAGES)
def test_scores_of_the_pages(page):
    """Each is in docs/logs or a paper's, or quotes.toml says that we have no log of it."""
    without_log = {*documents.QUOTES["elsewhere"].get(page, ())}
    scores = documents.scores_in(page)
    assert scores - documents.known_scores() <= without_log <= scores


def test_table_of_a_log(tmp_path, monkeypatch):
    """Chosen columns with our headings, without rows that were left out; a number in a sentence"""
    cell = {"paper": "-", "by": "", "ours": [[50.0], [52.0]], "state": "measured"}
    rows = [("TP", cell), ("CLIP", {**cell, "ours": [], "state": "left out: no --clip"})]
    rows = [{"row": label, "cells": {"map": cell, "knn": cell}} for label, cell in rows]
    path = tmp_path / "docs/logs/tables/race/own.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"columns": {"map": "mAP", "knn": "k-NN"}, "rows": rows}))
    monkeypatch.setattr(documents, "REPO", tmp_path)
    monkeypatch.setattr(documents, "LOGS", tmp_path / "docs/logs/tables")
    heading, _, *lines = documents.our_table("race/own.json", "knn = neighbours,\n map")
    assert heading == "|  | neighbours | mAP |"
    assert lines == ["| TP | 51.0 ± 1.4 | 51.0 ± 1.4 |"]
    assert documents.look_up("tables/race/own.json: TP: map") == "51.0 ± 1.4"


def test_recipes():
    """The commands on docs/recipes.md are those of the rows that it names."""
    steps = Steps(reproduce.get_args(["--dry-run"]))
    for table in "VirTex Tab. 1", "ICMLM Tab. 3", "Contrastive Tab. 1":
        steps.table(table)
    blocks = re.findall(r"^```sh\n(.*?)^```", documents.read("docs/recipes.md"), re.S | re.M)
    lines = re.sub(r"\s*\\\n\s*", " ", "".join(blocks)).splitlines()
    examples = {line for line in lines if "--output runs/papers/" in line}
    assert len(examples) == 11 and examples <= {*steps.commands}


def test_claims():
    """Each of our numbers in the tables of claims.md is one that tools/reproduce.py has written."""
    scenes, _, photos = (tables.REPO / "docs/claims.md").read_text().partition("## On photos")
    for column, size in (3, "scenes"), (4, "scenes-x4"), (3, "flickr8k"), (4, "flickr8k-x4"):
        page = scenes if size.startswith("scenes") else photos
        rows = [line.split("|") for line in page.splitlines()]
        runs = [json.loads(p.read_text()) for p in documents.LOGS.glob(f"{size}/*.json")]
        cells = [cell for run in runs for row in run["rows"] for cell in row["cells"].values()]
        known = set(" ".join(tables.in_words(cell) for cell in cells).split())
        quoted = re.findall(r"\d+\.\d", " ".join(row[column] for row in rows if len(row) == 7))
        assert len(quoted) > 5 and set(quoted) <= known
