"""tools/: compare.py's commands are ones that the scripts accept, and its table says what their
runs say; benchmark.py measures every method. tests/fuzz.py for half a minute."""

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from conftest import finished, result, run_script
from PIL import Image

from tools import benchmark, compare

# ------------------------------------------------------------------------------------ compare.py


@pytest.fixture
def photos(tmp_path):
    """24 captioned photos without tags and 36 labelled ones in folders -> flags of compare.py"""
    rng = np.random.default_rng(0)

    def photo(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(path)
        return str(path)

    lines = []
    for n in range(24):
        image = photo(tmp_path / "photos" / f"{n}.jpg")
        lines.append(json.dumps({"image": image, "captions": ["a noisy picture"]}))
    (tmp_path / "photos.jsonl").write_text("\n".join(lines))
    for split, number in (("train", 12), ("val", 6)):
        for name in ("noise", "noise again"):
            for n in range(number):
                photo(tmp_path / "labelled" / split / name / f"{n}.jpg")
    flags = ["--data", tmp_path / "photos.jsonl", "--output", tmp_path / "all runs"]
    flags += ["--probe-data", "folder", "--probe-root", tmp_path / "labelled"]
    return [*flags, "--image-size", 32, "--batch-size", 8, "--workers", 0]


def compare_with(*flags):
    compare.main(compare.get_args([str(flag) for flag in flags]))


def refused(*flags):
    with pytest.raises(SystemExit) as stopped:
        compare_with(*flags)
    return str(stopped.value)


def script_here(command):
    """In place of subprocess.run: the script runs in this process."""
    _, script, *flags = command
    module = importlib.import_module(Path(script).stem)
    try:
        module.main(module.get_args(flags))
    except SystemExit:
        return SimpleNamespace(returncode=1)
    return SimpleNamespace(returncode=0)


def test_one_table(photos, tmp_path, monkeypatch):
    """Two rows, two seeds, trained one after the other; the supervised row learns labels."""
    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=script_here))
    runs, flags = tmp_path / "all runs", [*photos, "--seeds", 2, "--iters", 1]
    flags += ["--train-split", "train", "--val-split", "val"]  # of the captions, not the labels
    compare_with(*flags, "--only", "supervised")
    labels = [json.loads(line) for line in (runs / "labels.jsonl").read_text().splitlines()]
    assert sorted(row["tags"][0] for row in labels) == ["noise"] * 12 + ["noise again"] * 12
    assert all(f"/train/{row['tags'][0]}/" in row["image"] for row in labels)
    settings = json.loads((runs / "supervised-1" / "args.json").read_text())
    assert (settings["labels"], settings["val_split"]) == ("instances", "train")
    assert (settings["recipe"], settings["seed"]) == ("small", 1)

    compare_with(*flags, "--only", "moco")

    table = (runs / "comparison.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]
    for row, name in zip(rows, ("moco", "supervised"), strict=True):
        probes = [result(runs / f"{name}-{seed}")["probe"] for seed in (0, 1)]
        for cell, backbone in ((4, "trained"), (5, "random")):
            one, other = (probe[backbone] for probe in probes)
            deviation = abs(one - other) / 2**0.5
            assert row[cell] == f"{(one + other) / 2:.1f} ± {deviation:.1f}"
    assert [row[:4] for row in rows] == [
        ["MoCo-v2", "photos", "8", "2"],
        ["Supervised", "labels", "8", "2"],
    ]
    kept = json.loads((runs / "result.json").read_text())["rows"]
    assert [row["method"] for row in kept] == ["MoCo-v2", "Supervised"]
    assert Image.open(runs / "comparison.png").height > 2 * 30

    assert "ended with an error" in refused(*flags, "--only", "moco", "--image-size", 64)


@pytest.mark.parametrize("name", compare.ROWS)
@pytest.mark.parametrize("data", ["shapes", "coco", "photos.jsonl"])
def test_flags_are_accepted(name, data, monkeypatch, tmp_path):
    """Every row's command, as its script parses it."""
    commands = []

    def recorded(command):
        commands.append(command[1:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(run=recorded))
    monkeypatch.setattr(compare, "labelled_photos", lambda args: "labels.jsonl")
    flags = ["--data", data, "--output", "all runs", "--probe-data", "folder", "--only", "tp", name]
    shared = ["--iters", "77", "--batch-size", "16", "--arch", "resnet18"]
    compare.train(name, 3, "small", compare.get_args([*flags, *shared]))
    [[script, *flags]] = commands
    args = importlib.import_module(Path(script).stem).get_args(flags)
    assert (args.iters, args.batch_size, args.arch) == (77, 16, "resnet18")
    assert (args.output, args.seed, args.probe_data) == (f"all runs/{name}-3", 3, "folder")
    if name == "supervised":
        assert (args.data, args.recipe) == ("labels.jsonl", "small")
    else:
        recipe = {"shapes": "demo", "coco": "paper"}.get(data, "small")
        assert (args.data, args.recipe) == (data, recipe)
    if name in ("icmlm-from-tp", "att-fc"):
        assert args.init == "all runs/tp-3/backbone.pth"


def test_refusals(photos, tmp_path, monkeypatch):
    """Before anything is trained; and rows that cannot be compared get no table."""
    monkeypatch.setattr(compare, "subprocess", None)
    starts = "error: the row icmlm-from-tp starts from tp: add it to --only"
    assert refused(*photos, "--only", "icmlm-from-tp", "moco") == starts
    (tmp_path / "all runs" / "tp-0").mkdir(parents=True)
    (tmp_path / "all runs" / "tp-0" / "backbone.pth").touch()
    compare.get_args([str(flag) for flag in (*photos, "--only", "icmlm-from-tp")])
    assert refused(*photos, "--only", "icmlm-from-tp", "--seeds", 2) == starts
    assert "give --seeds N" in refused(*photos, "--seed", 5)
    untagged = refused("--data", tmp_path / "photos.jsonl", "--output", tmp_path)
    assert untagged.endswith("has no tags to probe on: add --probe-data and --probe-root")

    monkeypatch.setattr(compare, "train", lambda *_: None)
    assert "no run has a probe" in refused(*photos)
    settings = [{"arch": f"resnet{n}", "data": "shapes", "probe_data": None} for n in (18, 50)]
    rows = [{"learns_from": "captions", "settings": given} for given in settings]
    with pytest.raises(SystemExit, match="holds runs with --arch resnet.*cannot be compared"):
        compare.check_comparable(rows, "runs")


# ---------------------------------------------------------------------------------- benchmark.py

TINY = ["--arch", "resnet18", "--image-size", "32", "--batch-size", "8", "--hidden", "64"]
TINY += ["--rounds", "1", "--amp", "off"]


def printed_speeds(output):
    """{name: (images per second, comment)}"""
    speeds = {}
    for line in output.splitlines():
        if "images/s" in line:
            speed, comment = line[20:].split("images/s")
            speeds[line[:20].strip()] = float(speed), comment.strip()
    return speeds


def test_benchmark_runs(monkeypatch, capsys):
    """Each method's step beside its floor, with a small BERT."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    bert = transformers.BertConfig(vocab_size=10_000, intermediate_size=64, **sizes)
    monkeypatch.setattr(benchmark, "BERT_BASE", bert)
    monkeypatch.setattr(benchmark, "STEPS", 1)
    benchmark.main(benchmark.get_args(TINY))
    speeds = printed_speeds(capsys.readouterr().out)
    assert speeds.keys() == {*benchmark.METHODS, "bare backbone", "contrastive floor"}
    for method in benchmark.METHODS:
        name = "contrastive floor" if method == "mmcontrastive" else "bare backbone"
        (speed, comment), (floor, _) = speeds[method], speeds[name]
        share, text = comment.split("% of the ")
        assert text == name and float(share) == pytest.approx(100 * speed / floor, rel=0.05)


def test_benchmark_of_the_whole_loop(coco_folder, monkeypatch, capsys):
    """The script itself is run until it has logged three times; its errors end the benchmark."""
    monkeypatch.setattr(benchmark, "DECODING", 0.1)
    flags = [*TINY, "--methods", "tp", "--workers", "0", "--data", "coco", "--root"]
    with pytest.raises(SystemExit, match="go with --data"):
        benchmark.get_args(TINY + ["--workers", "0"])
    benchmark.main(benchmark.get_args([*flags, str(coco_folder)]))
    speeds = printed_speeds(capsys.readouterr().out)
    assert speeds.keys() == {"bare backbone", "tp", "decoding", "tp, loop"}
    assert all(speed > 0 for speed, _ in speeds.values())
    assert "% of its step, " in speeds["tp, loop"][1]
    with pytest.raises(SystemExit, match="error: none.py ended with an error, see above"):
        benchmark.whole_loop("none", benchmark.get_args([]))


# --------------------------------------------------------------------------------------- fuzz.py


def test_bad_input():
    """Damaged files, wrong lines and SIGKILL: nothing lost, no hang, no code run"""
    flags = "--minutes", 0.25, "--seed", 1, "--scripts", "tp", "eval_linear"
    output = finished(run_script("tests/fuzz.py", *flags)).stdout.splitlines()[-1]
    counts = {ending: int(count) for count, ending in re.findall(r"(\d+) (\w+)", output)}
    assert counts["accepted"] + counts["refused"]
    assert not any(counts[ending] for ending in ("unclear", "hang", "code", "lost"))
