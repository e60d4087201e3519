"""tools/: benchmark.py measures every method, plot.py draws; twelve cases of tests/fuzz.py."""

import json
import re

import fuzz
import pytest
import transformers
from conftest import NEEDS_PICTURES, ROOT, finished, refusal, run_here, run_script
from PIL import Image

import eval_linear
from extras import shapes
from tools import benchmark, plot

WRONG = [
    ("tools.make_shards --output {tmp}/file", "{tmp}/file cannot be a folder: File exists"),
]


def test_own_words(tmp_path):
    """The frequent nouns, verbs and adjectives; photos of the other split have them or not."""
    shared = {0: "a dog runs", 1: "a dog sits", 2: "a red ball"}
    rows = []
    for n in range(40):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{n}.png")
        captions = ["the photo"] + ([shared[n % 10]] if n % 10 in shared else [])
        split = "val" if n >= 30 else "train"
        rows.append({"image": f"{n}.png", "captions": captions, "split": split})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "words.jsonl"
    run_here(["tools.own_words", tmp_path / "a.jsonl", "--output", output])
    found = list(map(json.loads, output.read_text().splitlines()))
    assert [row["image"] for row in found] == [str(tmp_path / f"{n}.png") for n in range(30, 40)]
    assert found[0]["tags"][0] == "dog" and found[1]["tags"][0] == "dog"  # 20%; "photo" is in all
    assert {*found[2]["tags"]} == {"red", "ball"} and not any(row["tags"] for row in found[3:])
    assert sorted(row["split"] for row in found) == ["learn"] * 5 + ["score"] * 5


def test_own_words_both_ways(tmp_path, monkeypatch):
    """Few photos are learned from and scored; 1,000 are not. Without --weights a line says how."""
    calls, rows = [], []
    monkeypatch.setattr(eval_linear, "main", lambda args: calls.append(args))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for n in range(1010):
        (tmp_path / f"{n}.png").symlink_to("a.png")
        captions = ["a dog runs" if n % 4 == 0 else "the photo"]
        row = {"image": f"{n}.png", "captions": captions, "split": "train" if n < 10 else "val"}
        rows.append(json.dumps(row))
    for number in (1009, 1010):
        (tmp_path / "a.jsonl").write_text("\n".join(rows[:number]))
        command = ["tools.own_words", tmp_path / "a.jsonl", "--output", tmp_path / "words.jsonl"]
        said = run_here(command)
        assert ("--val-split score --both-ways\n" in said) == (number < 1010)
        assert said.split("measure: python eval_linear.py")[1].count("--weights") == 1
        run_here([*command, "--weights", "A.pth", "random"])
    assert [args.weights for args in calls] == [["A.pth", "random"]] * 2
    assert [args.both_ways for args in calls] == [True, False]
    assert {args.data for args in calls} == {f"{tmp_path}/words.jsonl"}


def test_benchmark_runs(monkeypatch):
    """Each method's step beside its floor, with a small BERT."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    bert = transformers.BertConfig(vocab_size=10_000, intermediate_size=64, **sizes)
    monkeypatch.setattr(benchmark, "BERT_BASE", bert)
    monkeypatch.setattr(benchmark, "STEPS", 1)
    flags = "--arch resnet18 --image-size 32 --batch-size 8 --hidden 64 --rounds 1 --amp off"
    printed = run_here(["tools.benchmark", *flags.split()])
    found = re.findall(r"^(.{30}) +([0-9.]+) images/s +([0-9.]+)% of the (.*) \(", printed, re.M)
    rows = {name.strip(): (float(x), float(share), below) for name, x, share, below in found}
    assert rows.keys() == {*benchmark.METHODS, "bare backbone", "contrastive floor"}
    for name, (speed, share, below) in rows.items():
        assert below == ("contrastive floor" if name == "mmcontrastive" else "bare backbone")
        assert share == pytest.approx(100 * speed / rows[below][0], rel=0.05)


def test_loader_benchmark(tmp_path):
    """This code beside another checkout's, on the files and on smaller ones"""
    for n in range(3):
        shapes.draw(n, 600).save(tmp_path / f"{n}.jpg")
    flags = "--loader", tmp_path, "--baseline", ROOT, "--image-size", 32, "--rounds", 1
    first, *rows = run_here(["tools.benchmark", *flags]).splitlines()
    assert first.startswith("3 photos, crops of 32 px")
    kinds, codes = ("files as they are", "shrunk to 256 px"), ("baseline", "this code")
    expected = [f"{kind}, {code}" for kind in kinds for code in codes]
    for line, name in zip(rows, expected, strict=True):
        assert re.fullmatch(rf"{name} +\d+\.\d images/s +[\d.]+% of the {expected[0]} .*", line)


@NEEDS_PICTURES
def test_plot(tmp_path):
    """One panel per term that all runs have, also of validation alone; or those asked for."""
    rows = {"a": {"loss": 2.0, "ii": 1.0, "top1": 5}, "b": {"loss": 3.0, "validation_top1": 7}}
    for name, row in rows.items():
        (tmp_path / name).mkdir()
        line = json.dumps({"iteration": 10, "lr": 0.1, **row})
        (tmp_path / name / "metrics.jsonl").write_text(f"{line}\n{line}\n")
    assert plot.read_run(tmp_path / "b")["validation_top1"] == ([10, 10], [7, 7])
    picture, other = tmp_path / "b" / "curves.png", tmp_path / "ii.png"
    command = ["tools.plot", tmp_path / "a", tmp_path / "b"]
    for more, terms in ([], "loss, top1 of 2"), (["--terms", "ii", "--output", other], "ii of 2"):
        assert run_here([*command, *more]).startswith(terms)
        assert Image.open(more[-1] if more else picture).width == 675 * (1 + terms.count(","))
    assert "metrics.jsonl is missing" in refusal(["tools.plot", tmp_path])
    growth = run_here(["tools.plot", ROOT / "docs/scores.csv", "--output", other])
    assert growth.startswith("VirTex + ours, text first, Words alone")
    assert Image.open(other).width == 780


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, instead of their files"""
    figure, saved = pytest.importorskip("matplotlib.figure"), []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, dpi: saved.append(self))
    return saved


@NEEDS_PICTURES
def test_legend(tmp_path, figures):
    """It says what is dotted, if anything is, in whichever panel."""
    rows = [{"iteration": n, "loss": 2.0, "top5": 1.0, "validation_top5": 9.0} for n in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for terms in ("loss", "top5"), ("loss",):
        run_here(["tools.plot", tmp_path, "--terms", *terms])
    legends = [[text.get_text() for text in figure.legends[0].get_texts()] for figure in figures]
    assert legends == [[f"{tmp_path}", f"{tmp_path}, validation"], [f"{tmp_path}"]]


@NEEDS_PICTURES
def test_bars(tmp_path, figures):
    """Of each backbone its score and interval, and its difference; one alone has no interval."""
    row = {"mean": {"mAP": 41.5, "dog": 80.0, "chance": 10.0}}
    content = {"args": {"data": "folder", "root": "flowers", "protocol": "knn"}}
    more = {"interval": {"mAP": [39.0, 44.0]}}
    difference = {"mAP": {"points": 4.5, "interval": [2.5, 6.5]}}
    several = {
        "runs/tp/backbone.pth": row | more | {"differences": {"random": difference}},
        "random": {"mean": {"mAP": 37.0}, "interval": {"mAP": [36.0, 38.0]}, "differences": {}},
    }
    for backbones in (several, {"A.pth": row}):
        path = tmp_path / "result.json"
        path.write_text(json.dumps(content | {"backbones": backbones}))
        printed = run_here(["tools.plot", path])
        assert printed.startswith("mAP of") and printed.endswith(f"{tmp_path}/scores.png\n")
    [panel], [alone] = (figure.axes for figure in figures)
    assert [bar.get_width() for bar in panel.patches] == [41.5, 37.0]
    assert [list(x.get_xdata()) for x in panel.lines[:2]] == [[39.0, 44.0], [36.0, 38.0]]
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert labels == ["tp\n+4.5 (+2.5 to +6.5) against random", "random"]
    assert [bar.get_width() for bar in alone.patches] == [41.5]
    path.write_text('{"validation": {}}')
    assert "is no result.json of eval_linear.py" in refusal(["tools.plot", path])


@NEEDS_PICTURES
@pytest.mark.parametrize("module", ("downstream.pictures", "tools.plot"))
def test_in_a_jupyter_cell(module, tmp_path):
    """Its commands inherit a backend of matplotlib that may not be installed; none is needed."""
    (tmp_path / "metrics.jsonl").write_text(2 * '{"iteration": 10, "loss": 1.0}\n')
    script = {
        "downstream.pictures": "module.draw_rows('curves.png', [('a dog', [])] * 2)",
        "tools.plot": "module.main(module.get_args(['.']))",
    }[module]
    script = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import {module} as module; {script}"
    backend = "none_inline"
    finished(run_script("-c", script, cwd=tmp_path, MPLBACKEND=backend))
    with Image.open(tmp_path / "curves.png") as image:
        assert min(image.size) > 0
    check = run_script("-c", "import matplotlib.figure", MPLBACKEND=backend)
    assert "is not a valid value for backend" in check.stderr


@pytest.mark.parametrize("command, message", WRONG)
def test_wrong_folders(command, message, tmp_path):
    (tmp_path / "file").touch()
    found = refusal(command.format(tmp=tmp_path).split())
    assert message.format(tmp=tmp_path) in found


def test_bad_input():
    """Damaged files, wrong lines and SIGKILL: nothing lost, no hang, no code run"""
    args = fuzz.get_args("--cases 12 --seed 1 --scripts tp eval_linear".split())
    counts = fuzz.main(args)  # defects are printed
    assert counts.total() == 12 and counts["accepted"] and counts["refused"]
    assert not any(counts[ending] for ending in ("unclear", "hang", "code", "lost"))
