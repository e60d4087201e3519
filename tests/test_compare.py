"""compare.py: its commands are ones that the scripts accept, and its table says what the runs say."""

import importlib
import json
import os
import subprocess
import sys
import time

import common
import compare
import numpy as np
import probe
import pytest
from PIL import Image


@pytest.fixture
def photos(tmp_path):
    """A .jsonl of 24 captioned photos, and 24 + 12 labelled ones of two classes in folders -> the flags of compare.py"""
    rng = np.random.default_rng(0)

    def photo(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(path)
        return str(path)

    lines = [json.dumps({"image": photo(tmp_path / "photos" / f"{n}.jpg"), "captions": ["a noisy picture"]}) for n in range(24)]
    (tmp_path / "photos.jsonl").write_text("\n".join(lines))
    for split, number in (("train", 12), ("val", 6)):
        for name in ("noise", "noise again"):
            for n in range(number):
                photo(tmp_path / "labelled" / split / name / f"{n}.jpg")
    flags = ["--data", tmp_path / "photos.jsonl", "--probe-data", "folder", "--probe-root", tmp_path / "labelled", "--output", tmp_path / "runs"]
    return [*flags, "--image-size", 32, "--batch-size", 8, "--workers", 0]


def test_one_table(photos, tmp_path, capsys):
    """Some rows now, one later; an ended run is not repeated; the supervised row learns from the probe's labels."""
    start = lambda *flags: compare.main(compare.get_args([*map(str, photos), "--iters", "1", *flags]))
    start("--only", "moco", "labels")
    trained = (tmp_path / "runs" / "moco" / "checkpoint.pth").stat().st_mtime_ns
    start("--only", "moco", "random")
    assert "is not repeated" in capsys.readouterr().out and (tmp_path / "runs" / "moco" / "checkpoint.pth").stat().st_mtime_ns == trained

    probes = {name: json.loads((tmp_path / "runs" / name / "probe" / "result.json").read_text()) for name in ("moco", "labels", "random")}
    assert [probes[name]["args"]["weights"] for name in probes] == [str(tmp_path / "runs" / name / "backbone.pth") for name in ("moco", "labels")] + ["random"]
    table = (tmp_path / "runs" / "comparison.md").read_text().splitlines()
    expected = [f"{probes[name]['mean']['mAP']:.1f}" for name in probes]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in table] == [
        ["method", "learns from", "iterations", "mAP"], ["---"] * 4, ["MoCo-v2", "photos", "1", expected[0]],
        ["Supervised", "labels", "1", expected[1]],
        ["Random initialisation", "nothing", "none", expected[2]],
    ]  # fmt: skip
    labels = [json.loads(line) for line in (tmp_path / "runs" / "labels.jsonl").read_text().splitlines()]
    assert sorted(row["tags"][0] for row in labels) == ["noise"] * 12 + ["noise again"] * 12
    assert all(f"/train/{row['tags'][0]}/" in row["image"] for row in labels)
    assert json.loads((tmp_path / "runs" / "labels" / "args.json").read_text())["labels"] == "instances"
    assert len(probe.label_data("folder", str(tmp_path / "labelled"), "train").images) == len(common.caption_data(str(tmp_path / "runs" / "labels.jsonl"), split="train"))
    assert Image.open(tmp_path / "runs" / "comparison.png").height > 3 * 28

    with pytest.raises(SystemExit, match="says --image-size 32, not 64"):
        start("--only", "moco", "--image-size", "64")
    with pytest.raises(SystemExit, match="a run of 1 iterations, not 2"):
        start("--only", "random", "--iters", "2")
    with pytest.raises(SystemExit, match="says --protocol svm-virtex, not sgd-mct"):
        start("--only", "random", "--protocol", "sgd-mct")
    with pytest.raises(SystemExit, match="says --seed 0, not 1"):
        start("--only", "random", "--seed", "1")
    with pytest.raises(SystemExit, match="says --fraction 1.0, not 0.5"):
        start("--only", "random", "--fraction", "0.5")
    with pytest.raises(SystemExit, match="labelled, not /nowhere"):
        start("--only", "random", "--probe-root", "/nowhere")
    assert {name: json.loads((tmp_path / "runs" / name / "probe" / "result.json").read_text()) for name in probes} == probes  # all as it was
    with pytest.raises(SystemExit, match="/nowhere"):
        start("--only", "moco", "--probe-root", "/nowhere", "--output", str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()
    with pytest.raises(SystemExit, match="the row icmlm-att-fc starts from tp: add it to --only"):
        start("--only", "icmlm-att-fc")


@pytest.mark.parametrize("name", [name for name, (_, _, script, *_) in compare.METHODS.items() if script])
@pytest.mark.parametrize("data", ["shapes", "photos.jsonl"])
def test_flags_are_accepted(name, data, monkeypatch):
    """Every row's flags, as its script parses them: the same data, backbone, size, batch and iterations for all."""
    commands = []
    monkeypatch.setattr(compare, "python", lambda args, script, *flags: commands.append((script, list(map(str, flags)))))
    monkeypatch.setattr(compare, "labelled_photos", lambda args: ["--data", data])
    shared = ["--iters", "77", "--fraction", "0.5", "--batch-size", "16", "--image-size", "48", "--arch", "vgg16"]
    compare.train(name, compare.get_args(["--data", data, "--output", "out", "--probe-data", "folder", *shared]))
    ((script, flags),) = commands
    args = importlib.import_module(script.removesuffix(".py")).get_args(flags)
    assert (args.data, args.iters, args.batch_size, args.image_size, args.arch) == (data, 77, 16, 48, "vgg16")
    assert args.fraction == (1.0 if name == "labels" else 0.5)


def test_a_stopped_comparison_leaves_no_training_behind(tmp_path):
    """SIGTERM reaches the script that runs: it writes its checkpoint and ends before the comparison does; the same command goes on."""
    command = [sys.executable, compare.__file__, "--only", "tp", "--image-size", "32", "--iters", "100000", "--workers", "0", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        while not (tmp_path / "tp" / "metrics.jsonl").exists() or not (tmp_path / "tp" / "metrics.jsonl").read_text():
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "tp.py was stopped" in errors
    iteration = common.read_checkpoint(tmp_path / "tp" / "checkpoint.pth")["iteration"]
    assert 10 <= iteration < 100000
    time.sleep(1)
    assert len((tmp_path / "tp" / "metrics.jsonl").read_text().splitlines()) == iteration // 10


def test_bars(tmp_path):
    """A bar of twice the score is twice as long, in the colour of what the method learns from."""
    compare.draw_bars([("one", "captions", 40.0), ("two", "nothing", 20.0)], "mAP", tmp_path / "bars.png", side=28, left=290, width=500)
    pixels = np.asarray(Image.open(tmp_path / "bars.png").convert("RGB"))
    assert (pixels[14] == (0x3B, 0x6F, 0xB6)).all(1).sum() == pytest.approx(500, abs=3)  # less the line of the second score
    assert (pixels[14 + 28] == (0x99, 0x99, 0x99)).all(1).sum() == pytest.approx(250, abs=3)


def test_bad_flags():
    with pytest.raises(SystemExit, match="--probe-data and --probe-root"):
        compare.get_args(["--data", "coco"])
    with pytest.raises(SystemExit, match="--protocol sgd-mct wants one label per image"):
        compare.get_args(["--protocol", "sgd-mct"])
    with pytest.raises(SystemExit, match="a multiple of 4"):
        compare.get_args(["--batch-size", "30"])
