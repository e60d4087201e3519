"""virtex.py as a user runs it: every task, kill and resume, several processes, inference, and each bad input."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, run_script

import common
import virtex

TINY = ["--arch", "resnet18", "--image-size", 32, "--hidden", 64, "--batch-size", 8, "--workers", 0, "--log-every", 1, "--lr", 0.05, "--text-lr", 0.05]


def tiny(coco_folder, output, *flags):
    return ["virtex.py", "--data", "coco", "--root", coco_folder, "--output", output, *TINY, *flags]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def finished(process):
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process


def kill_at(iteration, command, folder):
    """Start the script and kill it with SIGKILL as soon as it has logged `iteration`."""
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    path = folder / "metrics.jsonl"
    while not (path.exists() and f'"iteration": {iteration},' in path.read_text()):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_three_times_ends_with_the_same_bits(coco_folder, tmp_path):
    """SIGKILL before the first checkpoint, right after one and between two; two workers against none (DESIGN Sec. 4)."""
    flags = ["--iters", 14, "--checkpoint-every", 4, "--probe-images", 12]
    finished(run_script(*tiny(coco_folder, tmp_path / "whole", *flags)))
    killed = tiny(coco_folder, tmp_path / "killed", *flags, "--workers", 2)
    for iteration in (2, 8, 11):
        kill_at(iteration, killed, tmp_path / "killed")
    output = finished(run_script(*killed)).stdout
    assert "going on from iteration" in output
    for name in ("backbone.pth", "result.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    assert [row["iteration"] for row in metrics(tmp_path / "killed")] == list(range(1, 15))
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "killed")):
        assert one["loss"] == other["loss"] and one["lr"] == other["lr"]

    ended = finished(run_script(*killed))
    assert "has ended" in ended.stdout
    refused = run_script(*killed, "--lr", 0.2)
    assert refused.returncode == 1 and "--lr 0.05, not 0.2" in refused.stderr and "Traceback" not in refused.stderr


def test_sigterm_writes_a_checkpoint_and_leaves(coco_folder, tmp_path):
    """SIGTERM: the step is finished, the checkpoint written, the message says how to go on (DESIGN Sec. 8)."""
    command = [sys.executable, *map(str, tiny(coco_folder, tmp_path, "--iters", 100_000, "--checkpoint-every", 100_000, "--workers", 1))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "checkpoint written" in output and "Traceback" not in errors
    iteration = torch.load(tmp_path / "checkpoint.pth", weights_only=True)["iteration"]
    assert iteration == metrics(tmp_path)[-1]["iteration"] >= 1


def test_two_processes(coco_folder, tmp_path):
    """torchrun with gloo: it trains, every iteration is logged once, there is one set of files, a resumed run goes on."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    finished(run_script(*launch, *tiny(coco_folder, tmp_path, "--iters", 6, "--checkpoint-every", 3, "--probe-images", 12)))
    assert [row["iteration"] for row in metrics(tmp_path)] == list(range(1, 7))
    assert {path.name for path in tmp_path.iterdir()} == {"args.json", "metrics.jsonl", "checkpoint.pth", "backbone.pth", "result.json", "tokenizer.model"}
    assert json.loads((tmp_path / "args.json").read_text())["processes"] == 2
    refused = run_script(*launch, *tiny(coco_folder, tmp_path, "--batch-size", 9))
    assert refused.returncode != 0 and "cannot be divided over 2 processes" in refused.stderr


@pytest.mark.parametrize("task", virtex.TASKS)
def test_every_task_learns_its_captions(task, coco_folder, tmp_path, capsys):
    """Each task overfits 24 pictures: the loss falls by 1.5 nats or more; the output folder keeps its contract."""
    flags = tiny(coco_folder, tmp_path, "--task", task, "--iters", 60, "--probe-images", 12, "--crop-min", 0.9)[1:]
    virtex.main(virtex.get_args(list(map(str, flags))))
    rows = metrics(tmp_path)
    assert sum(row["loss"] for row in rows[-5:]) / 5 < sum(row["loss"] for row in rows[:5]) / 5 - 1.5
    assert all(row.keys() >= {"iteration", "loss", "lr", "images_per_s", "data_wait"} for row in rows)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["probe"].keys() == {"data", "metric", "trained", "random"}
    import torchvision

    wrong = torchvision.models.resnet18().load_state_dict(torch.load(tmp_path / "backbone.pth", weights_only=True), strict=False)
    assert wrong.missing_keys == ["fc.weight", "fc.bias"] and not wrong.unexpected_keys
    assert "linear probe on coco" in capsys.readouterr().out


def test_half_precision_goes_on_from_a_run_without_it(coco_folder, tmp_path):
    """--amp may change when a run goes on; under fp16 the steps that the scaler skips leave the weights finite."""
    flags = tiny(coco_folder, tmp_path, "--iters", 6, "--probe-images", 12)[1:]
    virtex.main(virtex.get_args(list(map(str, [*flags, "--amp", "off"]))))
    checkpoint = torch.load(tmp_path / "checkpoint.pth", weights_only=True)
    torch.save({**checkpoint, "iteration": 3}, tmp_path / "checkpoint.pth")  # as if it had been killed half-way
    (tmp_path / "result.json").unlink()
    virtex.main(virtex.get_args(list(map(str, [*flags, "--amp", "fp16"]))))
    checkpoint = torch.load(tmp_path / "checkpoint.pth", weights_only=True)
    assert checkpoint["iteration"] == 6 and checkpoint["scaler"]
    assert all(value.isfinite().all() for value in checkpoint["model"].values())


def test_captions_and_pictures(coco_folder, tmp_path, capsys):
    """--caption prints a caption per photo and draws one picture each, with the checkpoint alone; --probe-every keeps the best."""
    train = tiny(coco_folder, tmp_path, "--iters", 30, "--probe-images", 20, "--probe-every", 15, "--crop-min", 0.9)[1:]
    virtex.main(virtex.get_args(list(map(str, train))))
    assert json.loads((tmp_path / "result.json").read_text())["probe"]["best"]["iteration"] in (15, 30)
    assert common.backbone_weights(common.read_checkpoint(tmp_path / "backbone_best.pth"), "best")[0] == "resnet18"
    photos = [str(path) for path in sorted((coco_folder / "train2017").iterdir())[:3]]
    capsys.readouterr()
    virtex.main(virtex.get_args(["--caption", *photos, "--weights", str(tmp_path / "checkpoint.pth"), "--output", str(tmp_path)]))
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 3 and all(line.startswith(photo) for line, photo in zip(lines, photos))
    assert len(list((tmp_path / "captions").glob("*.png"))) == 3


def test_learns_on_shapes(tmp_path):
    """On the built-in data the trained backbone beats its random initialisation by 4 mAP or more (measured: 8.7)."""
    finished(run_script("virtex.py", "--output", tmp_path))
    probe = json.loads((tmp_path / "result.json").read_text())["probe"]
    assert probe["trained"] > probe["random"] + 4


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--data", "nonsense"], "--data nonsense is unknown"),
        (["--data", "coco", "--root", "no/such/folder"], "no/such/folder/annotations/captions_train2017.json not found"),
        (["--data", "missing.jsonl"], "missing.jsonl not found"),
        (["--train-split", "test"], 'has the splits "train" and "val"'),
        (["--hidden", "100"], "multiple of 64"),
        (["--fraction", "0"], "--fraction"),
        (["--captions-per-image", "0"], "--captions-per-image"),
        (["--batch-size", "0"], "--batch-size"),
        (["--warmup", "1.5"], "--warmup"),
        (["--caption", "photo.jpg"], "need --weights"),
        (["--weights", "x.pth"], "goes with --caption"),
        (["--caption", "photo.jpg", "--weights", "none.pth"], "none.pth not found"),
        (["--tokenizer", "none.model"], "none.model not found"),
        (["--probe-every", "-1"], "--probe-every"),
        (["--seed", "-1"], "--seed -1"),
        (["--iters", "5", "--epochs", "1"], "--iters or --epochs, not both"),
        (["--caption", "photo.jpg", "--evaluate", "--weights", "x.pth"], "--caption or --evaluate, not both"),
        (["--probe-root", "folder"], "--probe-root goes with --probe-data"),
        (["--clip", "-1"], "--clip above 0"),
    ],
)
def test_bad_flags_are_one_clear_line(flags, message, tmp_path, no_training):
    """Wrong flags end with one line that says what is wrong (DESIGN Sec. 8)."""
    with pytest.raises(SystemExit) as stopped:
        virtex.main(virtex.get_args([*flags, "--output", str(tmp_path / "run")]))
    assert message in str(stopped.value) and "\n" not in str(stopped.value)


def test_a_loss_that_is_not_finite_keeps_the_last_good_state(coco_folder, tmp_path):
    """A diverging run stops, says what to try, and its checkpoint is finite (DESIGN Sec. 8)."""
    flags = tiny(coco_folder, tmp_path, "--iters", 60, "--checkpoint-every", 1, "--text-lr", 1e15, "--clip", 1e15, "--warmup", 0.2)[1:]
    with pytest.raises(SystemExit, match="Try a lower learning rate"):
        virtex.main(virtex.get_args(list(map(str, flags))))
    state = torch.load(tmp_path / "checkpoint.pth", weights_only=True)
    assert all(value.isfinite().all() for value in state["model"].values())


def test_photos_that_cannot_be_decoded(coco_folder, tmp_path, capsys):
    """One bad photo in 24 is over 1%: the run ends and names it; skipped.txt lists it."""
    import shutil

    shutil.copytree(coco_folder, tmp_path / "data")
    bad = sorted((tmp_path / "data" / "train2017").iterdir())[5]
    bad.write_bytes(bad.read_bytes()[:300])
    flags = tiny(tmp_path / "data", tmp_path / "run", "--iters", 9)[1:]
    with pytest.raises(SystemExit, match="cannot be decoded"):
        virtex.main(virtex.get_args(list(map(str, flags))))
    assert (tmp_path / "run" / "skipped.txt").read_text() == f"{bad}\n"
    bad.unlink()
    with pytest.raises(SystemExit, match="1 of 24 images are missing"):
        virtex.main(virtex.get_args(list(map(str, [*flags, "--fresh"]))))


def test_flickr8k_photos_become_batches(real_data, tmp_path):
    """A few steps on real photos in COCO's layout with splits of another name."""
    flags = ["--data", "coco", "--root", real_data / "flickr8k", "--train-split", "train", "--val-split", "val", "--fraction", 0.02, *TINY, "--iters", 4, "--output", tmp_path]
    virtex.main(virtex.get_args(list(map(str, flags))))
    result = json.loads((tmp_path / "result.json").read_text())
    assert "probe" not in result and result["validation_loss"]["forward"] > 0
