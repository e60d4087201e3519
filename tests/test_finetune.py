"""downstream/finetune.py: schedule, fraction of the labels, readers, exact resume, processes."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import ALONE, checkpoint_in, files_in, in_two_processes, kill_at
from conftest import metrics, refusal, result, run_here

import common
import eval_linear
import shapes
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


# --------------------------------------------------------------------------- schedule, score, files


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
    again = run_here([SCRIPT, *tiny(tmp_path, "--epochs", 10)])
    assert again.splitlines()[-1] == output.splitlines()[-1] and metrics(tmp_path) == rows


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


class Reddish(torch.nn.Module):
    """Logits are the means of red and blue; keeps what it was given, and in which mode."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, images):
        self.seen.append((images, self.training))
        return images.mean((2, 3))[:, [2, 0]]


def test_validation(photos, tmp_path):
    """Top-1 of the centres, 224 / 256 of the smaller side, in eval mode; then training again"""
    shutil.copytree(photos / "val", tmp_path / "val")
    shutil.copy(photos / "val" / "red" / "0.jpg", tmp_path / "val" / "blue" / "0.jpg")  # wrong
    val = eval_linear.label_data("folder", str(tmp_path), "val")
    flags = "--data folder --weights random --arch resnet18 --amp off --workers 0 --image-size 36"
    flags = [*flags.split(), "--output", str(tmp_path)]
    model, expected = Reddish(), []
    for path in val.images:
        with common.Image.open(path) as image:
            border = 40 * (1 - 224 / 256) / 2
            box = border, border, 40 - border, 40 - border
            expected.append(np.array(image.resize((36, 36), common.Image.BILINEAR, box)))
    scores = finetune.validate(model, val, finetune.get_args(flags), ALONE)
    assert scores == {"top1": pytest.approx(100 * 11 / 12)} and model.training
    [(images, training)] = model.seen
    torch.testing.assert_close(images, common.augment(torch.from_numpy(np.stack(expected))))
    assert not training


# ------------------------------------------------------------------------- two backbones, processes


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(3)
    state = common.build_backbone("resnet18").state_dict()
    torch.save(state, tmp_path / "backbone.pth")
    return tmp_path / "backbone.pth"


SHAPES = "--batch-size 8 --image-size 32 --workers 0 --log-every 1 --epochs 1 --amp off".split()


def test_shapes_compares_with_random(few_scenes, weights, tmp_path):
    """Both are trained alike but for the learning rate; after a stop only what is missing."""
    few_scenes(90, 30)
    folder = tmp_path / "run"
    command = [SCRIPT, *SHAPES, "--fraction", 0.5, "--weights", weights, "--output", folder]
    output = run_here(command)
    scores = {name: result(folder)[name]["top-1"] for name in ("trained", "random")}
    words = f"{scores['trained']} from {weights}, {scores['random']} from random initialisation"
    assert output.endswith(f": {words}\n")
    one, other = metrics(folder), metrics(folder / "random")
    assert one[0]["lr"] == pytest.approx(0.025 * 8 / 256)
    assert other[0]["lr"] == pytest.approx(0.1 * 8 / 256)
    assert [row["iteration"] for row in one] == [row["iteration"] for row in other]
    assert files_in(folder / "random") == FILES - {"result.json"}

    # As if it had been killed while the second one was trained.
    content, written = result(folder), checkpoint_in(folder / "random")
    trained = (folder / "checkpoint.pth").stat().st_mtime_ns
    (folder / "random" / "checkpoint.pth").unlink()
    run_here(command)
    assert result(folder) == content
    assert (folder / "checkpoint.pth").stat().st_mtime_ns == trained
    for name, value in checkpoint_in(folder / "random")["model"].items():
        assert torch.equal(value, written["model"][name])


def test_scenes_of_one_shape(few_scenes):
    """One label each: the scene's shape"""
    few_scenes(90, 30)
    data = finetune.labelled_split("shapes", None, "train")
    shapes_of = {scene: {o.shape for o in shapes.objects_of(scene)} for scene in range(90)}
    assert list(data.images) == [scene for scene in range(90) if len(shapes_of[scene]) == 1]
    for scene, label in zip(data.images, data.labels):
        assert {data.names[k] for k in np.flatnonzero(label)} == shapes_of[scene]


def test_killed_ends_with_the_same_bits(tiny, tmp_path):
    flags = "--epochs", 3, "--checkpoint-every", 4
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here([SCRIPT, *tiny(whole, *flags)])
    kill_at(7, [SCRIPT, *tiny(killed, *flags)])
    assert "resuming from iteration 4" in run_here([SCRIPT, *tiny(killed, *flags)])
    assert (whole / "backbone.pth").read_bytes() == (killed / "backbone.pth").read_bytes()
    assert result(whole)["random"] == result(killed)["random"]
    speed = {"images_per_s": 0, "data_wait": 0}
    for one, other in zip(metrics(whole), metrics(killed), strict=True):
        assert one | speed == other | speed
    one, other = checkpoint_in(whole)["model"], checkpoint_in(killed)["model"]
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_two_processes(few_scenes, weights, tmp_path):
    """By gloo: equal weights, each iteration logged once, validated.

    The backbone of random initialisation is then trained by the first process alone.
    """
    few_scenes(90, 8)
    folder = tmp_path / "run"
    flags = [*SHAPES, "--weights", weights, "--fraction", 0.5, "--epochs", 2, "--output", folder]
    in_two_processes(run_here, [SCRIPT, *flags])
    assert files_in(folder) == FILES | {"random"}
    for part in (folder, folder / "random"):
        rows = metrics(part)
        assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
        assert any("validation_top1" in row for row in rows)
        names = checkpoint_in(part)["model"]
        assert not any(name.startswith("module.") for name in names)
    assert json.loads((folder / "args.json").read_text())["processes"] == 2


# ---------------------------------------------------------------------------- fraction and readers


def test_fraction():
    """Of each class its fraction, at least one; the same for a seed; 10% are part of 30%."""
    rng = np.random.default_rng(0)
    classes = rng.permutation([0] * 100 + [1] * 31 + [2] * 4)
    images = common.ImageFiles(f"{n}.jpg" for n in range(135))
    data = eval_linear.LabelData(images, classes, list("abc"))
    kept = {}
    for fraction in (0.01, 0.1, 0.3):
        part = finetune.fraction_of_classes(data, fraction, seed=5)
        again = finetune.fraction_of_classes(data, fraction, seed=5)
        assert list(part.images) == list(again.images)
        numbers = [int(path.removesuffix(".jpg")) for path in part.images]
        assert (part.labels == classes[numbers]).all()
        counts = np.bincount(part.labels, minlength=3).tolist()
        assert counts == [max(1, round(fraction * n)) for n in (100, 31, 4)]
        kept[fraction] = set(part.images)
    assert kept[0.01] < kept[0.1] < kept[0.3]
    other = finetune.fraction_of_classes(data, 0.1, seed=6)
    assert set(other.images) != kept[0.1]


PATHS = "train_val2018/Aves/2/b.jpg", "train_val2018/Aves/9/a.jpg"
INAT = {
    "images": [{"id": 7, "file_name": PATHS[0]}, {"id": 3, "file_name": PATHS[1]}],
    "annotations": [
        {"id": 0, "image_id": 3, "category_id": 9},
        {"id": 1, "image_id": 7, "category_id": 2},
    ],
    "categories": [{"id": 9}, {"id": 2}, {"id": 4}],
}


@pytest.fixture
def inat(photos, tmp_path):
    """The published layout: train2018.json, val2018.json, photos in train_val2018/"""
    for path, name in zip(PATHS, ("red", "blue")):
        (tmp_path / path).parent.mkdir(parents=True)
        shutil.copy(photos / "train" / name / "0.jpg", tmp_path / path)
    for split in ("train2018", "val2018"):
        (tmp_path / f"{split}.json").write_text(json.dumps(INAT))
    return tmp_path


def test_inaturalist(inat, tiny):
    """Classes by category id, each image beside its own label; the script trains on it."""
    data = finetune.labelled_split("inat", str(inat), "train2018")
    assert list(data.images) == [str(inat / path) for path in PATHS]
    assert data.names == ["2", "4", "9"] and data.labels.tolist() == [0, 2]
    flags = tiny(inat / "run", "--data", "inat", "--root", inat, "--epochs", 6)
    run_here([SCRIPT, *flags])
    assert metrics(inat / "run")[0]["loss"] == pytest.approx(np.log(3), abs=0.3)


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--data voc07", "argument --data: invalid choice: 'voc07'"),
        ("--data inat --root no/such", "no/such/train2018.json"),
        ("--val-split test", "photos0/test"),
        ("--weights runs/virtex/backbone.pth", "python virtex.py"),
    ],
)
def test_refusals(flags, words, tiny, tmp_path, no_training, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no runs/virtex
    assert words in refusal([SCRIPT, *tiny(tmp_path / "run"), *flags.split()])


def test_random_needs_an_architecture_and_processes_an_even_batch(monkeypatch):
    with pytest.raises(SystemExit, match="--weights random needs --arch"):
        finetune.get_args(["--weights", "random"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="--batch-size 9 cannot be divided by 2 processes"):
        finetune.get_args("--weights random --arch resnet18 --batch-size 9".split())
