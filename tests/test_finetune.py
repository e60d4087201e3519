"""downstream/finetune.py: schedule, fraction of the labels, readers, exact resume, processes."""

import json

import numpy as np
import pytest
import torch
from conftest import checkpoint_in, files_in, in_two_processes, metrics, photos_at, result
from conftest import run_here

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
    words = f"{scores['trained']} from {weights}, {scores['random']} from random initialisation"
    guess = f"{content['random']['commonest class']} by guessing the commonest class"
    assert output.endswith(f": {words}, {guess}\n")
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
    run_here(command)
    assert result(folder) == content
    assert (folder / "checkpoint.pth").stat().st_mtime_ns == trained


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
