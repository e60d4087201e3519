"""downstream/finetune.py: schedule, fraction of the labels, readers, exact resume, processes."""

import json
import os

import numpy as np
import pytest
import torch
from conftest import checkpoint_in, files_in, in_two_processes, kill_at, metrics, photos_at
from conftest import refusal, result, run_here
from PIL import Image

import common
import eval_linear
from downstream import finetune

FILES = {"args.json", "metrics.jsonl", "checkpoint.pth", "backbone.pth", "result.json"}
TINY = "--image-size 32 --batch-size 6 --workers 0 --log-every 1 --amp off".split()


def test_two_processes_compare_with_random(few_scenes, tmp_path):
    """Both are trained alike but for the learning rate. After a stop only what is missing."""
    few_scenes(20, 3)
    folder, weights = tmp_path / "run", tmp_path / "backbone.pth"
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    flags = "--fraction", 0.5, "--epochs", 2, "--weights", weights, "--output", folder
    command = ["downstream.finetune", *TINY, *flags]
    output, _ = in_two_processes(run_here, command)
    content, random = result(folder), folder / "random"
    scores = {name: content[name]["top-1"] for name in ("trained", "random")}
    words = f"{scores['trained']:.1f} trained, {scores['random']:.1f} at random initialisation"
    assert output.endswith(f"\nfine-tuning on shapes: top-1 {words}\n")
    assert files_in(folder) == FILES | {"random"} and files_in(random) == FILES - {"result.json"}
    for part, lr in (folder, 0.025), (random, 0.1):
        rows = metrics(part)
        assert rows[0]["lr"] == pytest.approx(lr * 6 / 256)
        assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
        assert any("validation_top1" in row for row in rows)
        assert not any(name.startswith("module.") for name in checkpoint_in(part)["model"])
    assert json.loads((folder / "args.json").read_text())["processes"] == 2

    # As if it had been killed while the second one was trained.
    trained = (folder / "checkpoint.pth").stat().st_mtime_ns
    (random / "checkpoint.pth").unlink()
    in_two_processes(run_here, command)
    assert result(folder)["runs"] == content["runs"]
    assert (folder / "checkpoint.pth").stat().st_mtime_ns == trained


def test_schedule_and_exact_resume(few_scenes, tmp_path):
    """The rate falls to a tenth at 70% and 90%; a run that was killed, and saves when the minutes
    have passed, ends with the same bits.
    """
    few_scenes(20, 3)
    start = "--weights", "random", "--arch", "resnet18", "--fraction", 1, "--epochs", 5
    command = ["downstream.finetune", *TINY, *start, "--output"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here([*command, whole])
    kill_at(5, [*command, killed, "--save-minutes", 1e-6])
    assert checkpoint_in(killed)["iteration"] == 4
    run_here([*command, killed])
    rows = metrics(whole)
    done = np.arange(len(rows)) / len(rows)  # before each iteration
    rates = 0.1 * 6 / 256 * np.select([done < 0.7, done < 0.9], [1, 0.1], 0.01)
    assert len(rows) >= 10 and [row["lr"] for row in rows] == pytest.approx(rates)
    assert all("loss" in row for row in rows) and any("validation_top1" in row for row in rows)
    for one, two in zip(rows, metrics(killed), strict=True):
        assert all(one.get(key) == two.get(key) for key in ("loss", "validation_top1"))
    weights = [checkpoint_in(folder)["model"] for folder in (whole, killed)]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_it_resumes_by_content(few_scenes, tmp_path):
    """Weights and photos are compared by content, not by date or number."""
    few_scenes(12, 3)
    weights, run = tmp_path / "backbone.pth", tmp_path / "run"
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    flags = "--epochs", 1, "--fraction", 1, "--output", run
    command = ["downstream.finetune", *TINY, *flags, "--weights"]
    run_here([*command, weights])
    date = os.stat(weights).st_mtime_ns
    other = tmp_path / "other.pth"
    weights.rename(other)
    assert f"with weights {weights}, not {other}" in refusal([*command, other])
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    os.utime(weights, ns=(date, date))
    assert f"{run} holds a run with weights_hash" in refusal([*command, weights])
    other.rename(weights)
    few_scenes(13, 3)
    wrong = refusal([*command, weights, "--fraction", 0.9])
    assert "holds a run with fraction 1.0, not 0.9" in wrong
    assert "holds a run with other data" in refusal([*command, weights])


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--epochs 90 --steps 30 95", "--steps are epochs: at least 1, and the last below 90"),
        ("--epochs 90 --steps 0.6", "--steps are epochs: at least 1, and the last below 90"),
        ("--steps 0", "--steps must be above 0, not 0"),
        ("--fraction 50", "--fraction must be above 0 and at most 1, not 50"),
    ],
)
def test_ranges(flags, words):
    assert words in refusal(["downstream.finetune", *flags.split()])


def test_inaturalist(tmp_path, capsys):
    """Annotations in another order than the photos; categories that have photos are classes; photos
    without a label are counted, and files with one class, or without labels, are refused.
    """
    ids, categories = (7, 3, 5, 9), {5: 40, 7: 12, 3: 40}
    for n in ids:
        (tmp_path / f"{n}.jpg").touch()
    content = {"images": [{"id": n, "file_name": f"{n}.jpg"} for n in ids]}
    pairs = [{"image_id": n, "category_id": k} for n, k in categories.items()]
    file = tmp_path / "train2018.json"
    file.write_text(json.dumps(content | {"annotations": pairs}))
    data = finetune.labelled_split("inat", str(tmp_path), "train2018")
    assert list(data.images) == [f"{tmp_path}/{n}.jpg" for n in ids[:3]]
    assert [data.names[k] for k in data.labels] == [12, 40, 40] and data.names == [12, 40]
    assert "1 of 4 photos have no label: left out" in capsys.readouterr().out
    for more, message in ({"annotations": pairs[:1]}, "of one class"), ({}, "has no annotations"):
        file.write_text(json.dumps(content | more))
        with pytest.raises(SystemExit, match=message):
            finetune.labelled_split("inat", str(tmp_path), "train2018")


def test_photos_in_both_splits_are_counted(tmp_path):
    for n in range(4):
        photo = tmp_path / "train" / "ab"[n % 2] / f"{n}.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (60 * n, 0, 0)).save(photo)
    (tmp_path / "val").symlink_to(tmp_path / "train")
    flags = "--data", "folder", "--root", tmp_path, "--weights", "random", "--arch", "resnet18"
    command = ["downstream.finetune", *TINY, *flags, "--epochs", 1, "--output", tmp_path / "run"]
    assert "4 of 4 test photos are training photos, too" in run_here(command)


def test_fraction():
    """Of each class its fraction, at least one; the same for a seed; 10% are part of 30%."""
    classes = np.random.default_rng(0).permutation([0] * 100 + [1] * 31 + [2] * 4)
    data = eval_linear.LabelData(photos_at(*range(135)), classes, list("abc"))

    def part(fraction, seed=5, shots=None):
        part = finetune.part_of_classes(data, fraction, seed, shots)
        keep = [*map(int, part.images)]
        assert (part.labels == classes[keep]).all()
        return keep, np.bincount(part.labels, minlength=3).tolist()

    (few, _), (some, counts), (many, _) = (part(fraction) for fraction in (0.01, 0.1, 0.3))
    assert set(few) < set(some) < set(many) and counts == [10, 3, 1]
    assert part(0.1)[0] == some != part(0.1, seed=6)[0]
    assert part(1.0, shots=7)[1] == [7, 7, 4]
