"""downstream/finetune.py: schedule, fraction of the labels, readers, exact resume, processes."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import ALONE, checkpoint_in, files_in, in_two_processes, kill_at
from conftest import metrics, photos_at, refusal, result, run_here

import common
import eval_linear
from downstream import finetune

SCRIPT = "downstream.finetune.py"  # as run_here and refusal want it
FILES = {"args.json", "metrics.jsonl", "checkpoint.pth", "backbone.pth", "result.json"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """train: 12 red and 6 blue noisy photos, val: 6 and 6"""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, counts in (("train", (12, 6)), ("val", (6, 6))):
        for name, channel, count in zip(("red", "blue"), (0, 2), counts):
            (root / split / name).mkdir(parents=True)
            for n in range(count):
                pixels = rng.integers(0, 120, (40, 40, 3), np.uint8)
                pixels[..., channel] += 100
                common.Image.fromarray(pixels).save(root / split / name / f"{n}.jpg")
    return root


@pytest.fixture
def tiny(photos):
    """-> function (output, *flags) -> flags of a run of a second on 18 photos"""

    def flags(output, *more):
        data = "--data", "folder", "--root", photos, "--output", output, "--image-size", 32
        sizes = "--batch-size", 6, "--workers", 0, "--log-every", 1, "--amp", "off", "--lr", 0.02
        weights = "--weights", "random", "--arch", "resnet18"
        return [str(word) for word in (*data, *sizes, *weights, *more)]

    return flags


def test_schedule_and_output_folder(tiny, tmp_path):
    """A tenth after 70% and after 90% of the epochs [Sec. 4.3]; red and blue are told apart."""
    output = run_here([SCRIPT, *tiny(tmp_path, "--epochs", 10)])
    rows = metrics(tmp_path)
    factors = [1.0] * 7 + [0.1] * 2 + [0.01]  # of the epochs
    expected = [0.02 * factor for factor in factors for _ in range(18 // 6)]
    assert [row["lr"] for row in rows] == pytest.approx(expected)
    # 12 validation images: scored when 60 images have been trained on, and at the end.
    assert [row["iteration"] for row in rows if "validation_top1" in row] == [10, 20]
    assert files_in(tmp_path) == FILES
    assert result(tmp_path)["random"]["top-1"] == 100
    folder = "top-1 on folder after fine-tuning on 18 labels"
    assert output.splitlines()[-1] == f"{folder}: 100.0 from random initialisation"


def test_classifier():
    """torchvision's ResNet with the same weights; the layer starts as N(0, 0.01) and 0"""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = finetune.Classifier(common.build_backbone("resnet18"), 50).eval()
    weight, bias = model.linear.weight, model.linear.bias
    assert weight.std().item() == pytest.approx(0.01, rel=0.05) and not bias.any()
    state = {**model.backbone.state_dict(), "fc.weight": weight, "fc.bias": bias}
    theirs = resnet18(num_classes=50).eval()
    theirs.load_state_dict(state)
    images = torch.randn(3, 3, 40, 56)
    torch.testing.assert_close(model(images), theirs(images))


def test_validation(photos, tmp_path):
    """Top-1 of the centres, 224 / 256 of the smaller side, in eval mode; then training again"""
    shutil.copytree(photos / "val", tmp_path / "val")
    shutil.copy(photos / "val" / "red" / "0.jpg", tmp_path / "val" / "blue" / "0.jpg")  # wrong
    val = eval_linear.label_data("folder", str(tmp_path), "val")
    flags = "--data folder --weights random --arch resnet18 --amp off --workers 0 --image-size 36"
    flags = [*flags.split(), "--output", str(tmp_path)]
    model, seen, expected = torch.nn.Module(), [], []

    def means_of_red_and_blue(images):
        seen.append((images, model.training))
        return images.mean((2, 3))[:, [2, 0]]

    model.forward = means_of_red_and_blue
    for path in val.images:
        with common.Image.open(path) as image:
            border = 40 * (1 - 224 / 256) / 2
            box = border, border, 40 - border, 40 - border
            expected.append(np.array(image.resize((36, 36), common.Image.BILINEAR, box)))
    scores = finetune.validate(model, val, finetune.get_args(flags), ALONE)
    assert scores == {"top1": pytest.approx(100 * 11 / 12)} and model.training
    [(images, training)] = seen
    torch.testing.assert_close(images, common.augment(torch.from_numpy(np.stack(expected))))
    assert not training


def test_two_processes_compare_with_random(few_scenes, tmp_path):
    """By gloo: equal weights, each iteration logged once; both are trained alike but for the

    learning rate, the random one by the first process alone. After a stop only what is missing.
    """
    few_scenes(20, 3)
    folder, weights = tmp_path / "run", tmp_path / "backbone.pth"
    torch.manual_seed(3)
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    flags = "--batch-size 8 --image-size 32 --workers 0 --log-every 1 --epochs 2 --amp off"
    flags += " --fraction 0.5"
    command = [SCRIPT, *flags.split(), "--weights", weights, "--output", folder]
    output, _ = in_two_processes(run_here, command)
    scores = {name: result(folder)[name]["top-1"] for name in ("trained", "random")}
    words = f"{scores['trained']} from {weights}, {scores['random']} from random initialisation"
    assert output.endswith(f": {words}\n")
    assert files_in(folder) == FILES | {"random"}
    assert files_in(folder / "random") == FILES - {"result.json"}
    for part, lr in (folder, 0.025), (folder / "random", 0.1):
        rows = metrics(part)
        assert rows[0]["lr"] == pytest.approx(lr * 8 / 256)
        assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
        assert any("validation_top1" in row for row in rows)
        assert not any(name.startswith("module.") for name in checkpoint_in(part)["model"])
    assert json.loads((folder / "args.json").read_text())["processes"] == 2

    # As if it had been killed while the second one was trained.
    content, written = result(folder), checkpoint_in(folder / "random")["model"]
    trained = (folder / "checkpoint.pth").stat().st_mtime_ns
    (folder / "random" / "checkpoint.pth").unlink()
    run_here(command)
    assert result(folder) == content
    assert (folder / "checkpoint.pth").stat().st_mtime_ns == trained
    for name, value in checkpoint_in(folder / "random")["model"].items():
        assert torch.equal(value, written[name])


def test_killed_ends_with_the_same_bits(tiny, tmp_path):
    flags = "--epochs", 1, "--checkpoint-every", 2, "--steps", 0.3, 0.6  # of three iterations
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here([SCRIPT, *tiny(whole, *flags)])
    kill_at(3, [SCRIPT, *tiny(killed, *flags)])
    assert "resuming from iteration 2" in run_here([SCRIPT, *tiny(killed, *flags)])
    assert (whole / "backbone.pth").read_bytes() == (killed / "backbone.pth").read_bytes()
    assert result(whole)["random"] == result(killed)["random"]
    assert [row["lr"] for row in metrics(whole)] == pytest.approx([0.02, 0.002, 0.0002])
    speed = {"images_per_s": 0, "data_wait": 0}
    for one, other in zip(metrics(whole), metrics(killed), strict=True):
        assert one | speed == other | speed
    one, other = checkpoint_in(whole)["model"], checkpoint_in(killed)["model"]
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_fraction():
    """Of each class its fraction, at least one; the same for a seed; 10% are part of 30%."""
    rng = np.random.default_rng(0)
    classes = rng.permutation([0] * 100 + [1] * 31 + [2] * 4)
    images = photos_at(*(f"{n}.jpg" for n in range(135)))
    data = eval_linear.LabelData(images, classes, list("abc"))
    kept = {}
    for fraction in (0.01, 0.1, 0.3):
        part = finetune.part_of_classes(data, fraction, seed=5)
        again = finetune.part_of_classes(data, fraction, seed=5)
        assert list(part.images) == list(again.images)
        numbers = [int(path.removesuffix(".jpg")) for path in part.images]
        assert (part.labels == classes[numbers]).all()
        counts = np.bincount(part.labels, minlength=3).tolist()
        assert counts == [max(1, round(fraction * n)) for n in (100, 31, 4)]
        kept[fraction] = set(part.images)
    assert kept[0.01] < kept[0.1] < kept[0.3]
    other = finetune.part_of_classes(data, 0.1, seed=6)
    assert set(other.images) != kept[0.1]
    shots = finetune.part_of_classes(data, 1.0, seed=5, shots=7)
    assert np.bincount(shots.labels).tolist() == [7, 7, 4]


PATHS = "train_val2018/Aves/2/b.jpg", "train_val2018/Aves/9/a.jpg"
INAT = {
    "images": [{"id": 7, "file_name": PATHS[0]}, {"id": 3, "file_name": PATHS[1]}],
    "annotations": [
        {"id": 0, "image_id": 3, "category_id": 9},
        {"id": 1, "image_id": 7, "category_id": 2},
    ],
    "categories": [{"id": 9}, {"id": 2}, {"id": 4}],
}


def test_inaturalist(photos, tiny, tmp_path):
    """Classes by category id, each image beside its own label; the script trains on it."""
    for path, name in zip(PATHS, ("red", "blue")):
        (tmp_path / path).parent.mkdir(parents=True)
        shutil.copy(photos / "train" / name / "0.jpg", tmp_path / path)
    for split in ("train2018", "val2018"):
        (tmp_path / f"{split}.json").write_text(json.dumps(INAT))
    data = finetune.labelled_split("inat", str(tmp_path), "train2018")
    assert list(data.images) == [str(tmp_path / path) for path in PATHS]
    assert data.names == ["2", "4", "9"] and data.labels.tolist() == [0, 2]
    run_here([SCRIPT, *tiny(tmp_path / "run", "--data", "inat", "--root", tmp_path, "--epochs", 6)])
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(np.log(3), abs=0.3)


def test_refusals(tiny, tmp_path, no_training, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no runs/virtex
    for flags, words in (
        ("--data voc07", "argument --data: invalid choice: 'voc07'"),
        ("--data inat --root no/such", "no/such/train2018.json"),
        ("--val-split test", "photos0/test"),
        ("--weights runs/virtex/backbone.pth", "python virtex.py"),
    ):
        assert words in refusal([SCRIPT, *tiny(tmp_path / "run"), *flags.split()])
    assert "--weights random needs --arch" in refusal([SCRIPT, "--weights", "random"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = "--batch-size 9 cannot be divided by 2"
    assert words in refusal([SCRIPT, *tiny(tmp_path / "run", "--batch-size", 9)])
