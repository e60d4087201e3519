"""tools/reproduce.py: scripts accept each command of rows.toml; the documents are up to date."""

import importlib
import json
import re
import shlex

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


def test_photos_seen():
    """Each row of "own photos" sees as many; a row that starts from TP counts TP's, too."""
    flags = "--dry-run", "--minilm", "bert", "--imagenet", "--clip", "clip"
    steps = Steps(reproduce.get_args(["own photos", *flags]))
    steps.table("own photos")
    hours = tables.plan(steps.commands, "runs/papers", 56)[-1]
    assert "7.4 hours of training at 56 images/s" in hours
    seen = {}
    for command in steps.commands:
        words = shlex.split(command)[1:]
        given = dict(zip(words, words[1:]))
        if "--iters" in words:
            start = given.get("--init", "").removesuffix("/backbone.pth")
            _, photos = tables.length(words)
            seen[given["--output"]] = photos + seen.get(start, 0)
    assert seen.pop("runs/papers/own-tp-half") == 50_048
    assert seen.pop("runs/papers/own-lm") == 64  # its language model is what the others want
    assert len(seen) == 16 and {*seen.values()} == {100_096}


def test_labelled_folders(tmp_path):
    """A column for each, and their mean; backbones trained on a folder's labels count there."""
    flags = "--labelled", "flowers", "textures", "--seeds", "2", "--output", str(tmp_path)
    steps = Steps(reproduce.get_args(["own photos", *flags]))
    columns = ["own-map-flowers", "own-map-textures", "own-mean"]
    assert steps.tables["own photos"]["columns"][:3] == columns
    for seed in "", "-1":
        for folder, score in ("flowers", 50.0), ("textures", 40.0):
            backbone = tmp_path / f"own-supervised-{folder}{seed}"
            probe = backbone / f"own-map-{folder}"
            probe.mkdir(parents=True)
            (backbone / "result.json").write_text("{}")
            scores = {"backbone.pth": {"mean": {"mAP": score}}}
            (probe / "result.json").write_text(json.dumps({"backbones": scores}))
    steps.make_list = lambda name, seed: name
    cells = [steps.cell(column, "-", "own-supervised", None)["ours"] for column in columns]
    assert cells == [[[50.0], [50.0]], [[40.0], [40.0]], [[45.0], [45.0]]]


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
            "2,500 iterations of 64 images, 0.2 hours",
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
    for name in (known | MEASURES.keys()) - used:
        assert re.search(f"{{{re.escape(name)}[/}}]", started), f"nothing uses {name}"
    assert ROWS["draws"].keys() <= BACKBONES.keys()
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
    assert scores - documents.known_scores() <= without_log, "scores that are in no log"
    assert without_log <= scores, "no longer on the page: take it out of quotes.toml"


@pytest.fixture
def log(tmp_path, monkeypatch):
    """docs/logs/tables/race/own.json"""
    measured = {"paper": "-", "by": "", "ours": [[50.0], [52.0]], "state": "measured"}
    left_out = {"paper": "-", "by": "", "ours": [], "state": "left out: no --clip"}
    rows = [
        {"row": "TP", "cells": {"map": measured, "knn": measured}},
        {"row": "CLIP", "cells": {"map": left_out, "knn": left_out}},
    ]
    columns = {"map": "mAP", "knn": "k-NN"}
    path = tmp_path / "docs/logs/tables/race/own.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"columns": columns, "rows": rows}))
    monkeypatch.setattr(documents, "REPO", tmp_path)
    monkeypatch.setattr(documents, "LOGS", tmp_path / "docs/logs/tables")


def test_table_of_a_log(log):
    """The columns that a page asks for, with its headings, without rows that were left out"""
    heading, _, *lines = documents.our_table("race/own.json", "knn = neighbours,\n map")
    assert heading == "|  | neighbours | mAP |"
    assert lines == ["| TP | 51.0 ± 1.4 | 51.0 ± 1.4 |"]


def test_number_of_a_log(log):
    assert documents.look_up("tables/race/own.json: TP: map") == "51.0 ± 1.4"


def test_recipes():
    """The commands on docs/evaluation.md are those of the rows that it names."""
    steps = Steps(reproduce.get_args(["--dry-run"]))
    for table in "VirTex Tab. 1", "ICMLM Tab. 3", "Contrastive Tab. 1":
        steps.table(table)
    blocks = re.findall(r"^```sh\n(.*?)^```", documents.read("docs/evaluation.md"), re.S | re.M)
    lines = re.sub(r"\s*\\\n\s*", " ", "".join(blocks)).splitlines()
    examples = {line for line in lines if re.search("--output runs/papers/(?!NAME)", line)}
    assert len(examples) == 11 and examples <= {*steps.commands}


@pytest.mark.parametrize("first, second, verdict", [
    ([60.0, 62.0], [50.0, 52.0], "holds"),  # by 10; twice the standard error is 2.8
    ([50.0, 52.0], [60.0, 62.0], "reversed"),
    ([60.0, 62.0], [58.0, 60.0], "noise"),
    ([60.0], [49.0, 51.0], "holds"),  # of one seed, by 10 points
    ([60.0], [50.5, 50.6], "noise"),
])  # fmt: skip
def test_verdict(first, second, verdict):
    """The rule of docs/claims.md"""
    assert documents.verdict(first, second) == verdict


def test_claim(monkeypatch, log):
    """Our scores in the order of the claim; a claim is left out if there are no scores of it."""
    rows = [["A > B", "80, 70", "a > b", "1"], ["A > C", "80, 60", "a > c", ""]]
    claims = {"folder": "race", "ours": "ours", "here": "here", "paper": "mAP", "column": "map"}
    monkeypatch.setattr(documents, "CLAIMS", {"x": {**claims, "rows": rows}})
    cells = {name: {"map": {"by": "", "ours": seeds}} for name, seeds in SEEDS.items()}
    rows = [{"backbone": name, "cells": cell} for name, cell in cells.items()]
    (documents.LOGS / "race/own.json").write_text(json.dumps({"rows": rows}))
    heading, _, *lines = documents.claims_table("x")
    assert heading == "| claim | paper: mAP | ours | here |"
    assert lines == ["| A > B | 80, 70 | 81.0 ± 1.4, 60.0 | holds (1) |"]


SEEDS = {"a": [[80.0], [82.0]], "b": [[60.0]]}
