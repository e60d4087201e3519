"""eval_linear.py: labelled images, each protocol on small images, and the probe."""

import argparse
import json
import math
import os
import urllib.error
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from conftest import (
    ALONE,
    CPU,
    TORCHRUN,
    files_in,
    finished,
    in_two_processes,
    interrupted,
    refusal,
    result,
    run_here,
    run_script,
)
from PIL import Image
from torch import nn

import common
import eval_linear
import shapes
import svm

RANDOM = "--weights", "random", "--arch", "resnet18"


def command(output, root, flags="", data="folder"):
    """eval_linear.py on small images; the weights are random unless the flags name others."""
    words = ["eval_linear.py", "--output", output, "--data", data, "--root", root]
    weights = () if "--weights" in flags else RANDOM
    return [*words, "--image-size", 32, "--workers", 0, *weights, *flags.split()]


def evaluate(output, *given, **kwargs):
    """Run the command -> {class or metric: mean score}"""
    run_here(command(output, *given, **kwargs))
    return result(output)["mean"]


# ------------------------------------------------------------------------------- labelled images

VOC_SCENES = {"trainval": range(100, 148), "test": range(400, 432)}
LISTS = "VOCdevkit/VOC2007/ImageSets/Main"


def voc_label(scene, shape):
    """1 yes, -1 no, 0 (difficult) if all such objects of the scene are small and not solid"""
    objects = [o for o in shapes.objects_of(scene) if o.shape == shape]
    if not objects:
        return -1
    return int(any(o.size == "large" or o.fill == "solid" for o in objects))


@pytest.fixture(scope="module")
def voc(tmp_path_factory):
    """Built-in scenes in VOC07's genuine layout"""
    root = tmp_path_factory.mktemp("voc")
    photos = root / "VOCdevkit" / "VOC2007" / "JPEGImages"
    photos.mkdir(parents=True)
    (root / LISTS).mkdir(parents=True)
    for split, scenes in VOC_SCENES.items():
        for scene in scenes:
            shapes.draw(scene, 48).save(photos / f"{scene:06d}.jpg")
        (root / LISTS / f"{split}.txt").write_text("".join(f"{scene:06d}\n" for scene in scenes))
        for shape in shapes.SHAPES:
            rows = [f"{scene:06d} {voc_label(scene, shape):2d}\n" for scene in scenes]
            (root / LISTS / f"{shape}_{split}.txt").write_text("".join(rows))
    return root


@pytest.mark.parametrize("inside", ("", "VOCdevkit", "VOCdevkit/VOC2007"))
def test_voc07_labels(voc, inside):
    """--root may be any of the three folders. 1, -1 and 0 become 1, 0 and -1."""
    ours = {1: 1, -1: 0, 0: -1}
    for split, scenes in VOC_SCENES.items():
        data = eval_linear.label_data("voc07", voc / inside, split)
        assert data.names == sorted(shapes.SHAPES) and (data.labels == -1).any()
        for path, scene, row in zip(data.images, scenes, data.labels, strict=True):
            assert path.endswith(f"/{scene:06d}.jpg")
            assert row.tolist() == [ours[voc_label(scene, shape)] for shape in data.names]


def write_folder(root, count=4):
    """{train,val}/{blue,red}/<n>.png: noise around the colour -> root"""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name, colour in (("blue", (50, 50, 200)), ("red", (200, 50, 50))):
            (root / split / name).mkdir(parents=True)
            for n in range(count):
                noise = rng.normal(colour, 40, (40, 40, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(noise).save(root / split / name / f"{n}.png")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """16 blue and 16 red images for training, and as many for testing"""
    return write_folder(tmp_path_factory.mktemp("folder"), 16)


def test_folder_labels(tmp_path):
    """Classes are the folders in order, with images at any depth, and without the hidden ones."""
    write_folder(tmp_path, 2)
    for name in ("red/notes.txt", "red/deep/b.JPEG", ".ipynb_checkpoints/red.png"):
        path = tmp_path / "train" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    data = eval_linear.label_data("folder", tmp_path, "train")
    names = [path.removeprefix(f"{tmp_path}/train/") for path in data.images]
    assert names == ["blue/0.png", "blue/1.png", "red/0.png", "red/1.png", "red/deep/b.JPEG"]
    assert data.names == ["blue", "red"]
    assert data.labels.tolist() == [0, 0, 1, 1, 1] and data.labels.dtype == np.int64
    assert data.select([4, 0]).labels.tolist() == [1, 0]


def write_jsonl(folder):
    """The images of an image folder, with the names of their folders as tags -> the .jsonl"""
    lines = []
    for split in ("train", "val"):
        for path in sorted((folder / split).rglob("*.png")):
            row = {"image": str(path), "tags": [path.parent.name], "split": split}
            lines.append(json.dumps(row))
    (folder / "photos.jsonl").write_text("\n".join(lines))
    return folder / "photos.jsonl"


CAT = f"{LISTS}/cat_trainval.txt"
BAD_DATA = [  # the source; its files, a line in each; words of the message
    ("voc07", {}, "holds no VOCdevkit/VOC2007/ImageSets/Main/<class>_trainval.txt: give VOCdevkit"),
    ("voc07", {CAT: "5 1"}, "1 of 1 images are missing, the first is"),
    ("folder", {}, "/train'; an image folder holds train/<class>/<image>: see --train-split"),
    ("folder", {"train/a/notes.txt": ""}, "no valid file for the classes a. Supported extensions"),
    ("folder", {"train/a/1.png": "", "val/b/1.png": ""}, "different classes: ['a', 'b'] in one"),
    ("a.jsonl", {"a.jsonl": '{"image": "a.jsonl", "split": "train"}'}, "has no tags to score"),
]


@pytest.mark.parametrize("data, files, message", BAD_DATA)
def test_bad_data_are_refused(data, files, message, tmp_path):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    data = tmp_path / data if data.endswith("jsonl") else data
    assert message in refusal(command(tmp_path / "out", tmp_path, data=data))


def test_a_jsonl_with_tags(folder, tmp_path):
    """Its tags are the classes, several per image: the same scores as of the folder"""
    path = write_jsonl(folder)
    data = eval_linear.label_data(str(path), split="train")
    assert data.names == ["blue", "red"] and data.labels.tolist() == 16 * [[1, 0]] + 16 * [[0, 1]]
    scores = evaluate(tmp_path / "jsonl", folder, data=path)
    assert scores == evaluate(tmp_path / "folder", folder)


# --------------------------------------------------------------------------------- the protocols

LAYERS = "layers --batch-size 16 --image-size 48"


@pytest.mark.parametrize(
    "flags, metrics",
    [
        ("svm-virtex", "mAP,blue,red"),
        ("svm-icmlm", "mAP,blue,red"),
        ("sgd-virtex --batch-size 16 --epochs 12", "top-1"),
        ("sgd-mct --epochs 12", "top-1"),
        ("logreg-icmlm --epochs 30", "top-1"),
        (f"{LAYERS} --epochs 8 --lr 0.3", "C-11 top-1,C-12 top-1,C-13 top-1"),
    ],
)
def test_what_is_separable_is_learned(flags, metrics, folder, tmp_path, monkeypatch):
    """Red against blue. The backbone is in eval mode and frozen, and so are its statistics."""
    backbone = common.build_backbone("vgg16_bn" if "layers" in flags else "resnet18")
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    monkeypatch.setattr(eval_linear, "load_backbone", lambda *_: backbone)
    mean = evaluate(tmp_path, folder, f"--protocol {flags}")
    assert mean.keys() == set(metrics.split(",")) and min(mean.values()) > 80
    assert "layers" in flags or min(mean.values()) > 95
    assert not backbone.training
    assert all(torch.equal(before[key], value) for key, value in backbone.state_dict().items())


def test_it_is_not_right_by_itself(folder, tmp_path):
    """With a learning rate of almost zero: what was right above had been learned."""
    flags = "--protocol sgd-virtex --batch-size 16 --epochs 1 --lr 1e-9"
    assert evaluate(tmp_path, folder, flags)["top-1"] < 95


def test_several_labels_per_image(voc, coco_folder, tmp_path):
    """A score for each class with test examples and their mean; `layers`: after each layer"""
    present = set()
    for scene in VOC_SCENES["test"]:
        present |= {shape for shape in shapes.SHAPES if voc_label(scene, shape) == 1}
    mean = evaluate(tmp_path, voc, "", "voc07")
    score = mean.pop("mAP")
    assert mean.keys() == present and score == pytest.approx(np.mean(list(mean.values())))
    assert len(evaluate(tmp_path, coco_folder, "", "coco")) > 4
    flags = f"--weights random --arch vgg16_bn --protocol {LAYERS} --epochs 1"
    mean = evaluate(tmp_path, voc, flags, "voc07")
    assert list(mean) == ["C-11 mAP", "C-12 mAP", "C-13 mAP"]
    assert all(0 < score < 100 for score in mean.values())


def test_two_runs_give_mean_and_deviation(voc, tmp_path):
    """--runs 2: two seeds, in the file and in the table"""
    output = run_here(command(tmp_path, voc, "--runs 2", "voc07"))
    found = result(tmp_path)
    one, two = [scores["mAP"] for scores in found["runs"]]
    mean, deviation = (one + two) / 2, abs(one - two) / math.sqrt(2)
    assert one != two and found["mean"]["mAP"] == pytest.approx(mean)
    assert found["std"]["mAP"] == pytest.approx(deviation)
    assert output.splitlines()[-1].split() == ["mAP", f"{mean:.2f}", "±", f"{deviation:.2f}"]
    assert evaluate(tmp_path, voc, "--seed 1", "voc07") == found["runs"][1]


def cosine(lr, steps):
    return [lr * (1 + math.cos(math.pi * n / steps)) / 2 for n in range(steps)]


@pytest.mark.parametrize(
    "flags, rates",
    [
        # VirTex App. A.1: batch 256, lr 0.3, 100 epochs: 8 images make 4 iterations.
        ("--protocol sgd-virtex --train-images 8", cosine(0.3, 4)),
        ("--protocol sgd-virtex --batch-size 16 --epochs 1", cosine(0.3 / 16, 2)),
        # Contrastive paper Sec. 4.2: lr 30, divided by 5 at epochs 30, 40 and 50 of 60.
        ("--protocol sgd-mct", [30.0] * 30 + [6.0] * 10 + [1.2] * 10 + [0.24] * 10),
        ("--protocol sgd-mct --epochs 6 --lr 2", [2.0] * 3 + [0.4, 0.08, 0.016]),
    ],
)
def test_schedules(flags, rates, folder, tmp_path, monkeypatch):
    """Momentum 0.9, no weight decay; crops of 20-100% of the area, no colour jitter."""
    steps, step, views, crop = [], torch.optim.SGD.step, set(), common.random_crop
    jitters, jitter = set(), common.colour_jitter

    def recorded(self):
        [group] = self.param_groups
        steps.append((group["lr"], group["momentum"], group["weight_decay"]))
        step(self)

    monkeypatch.setattr(torch.optim.SGD, "step", recorded)
    recorded_crop = lambda rng, s, *size: views.add(s) or crop(rng, s, *size)
    monkeypatch.setattr(common, "random_crop", recorded_crop)
    monkeypatch.setattr(common, "colour_jitter", lambda rng, s: jitters.add(s) or jitter(rng, s))
    evaluate(tmp_path, folder, f"{flags} --weights random --arch resnet18")
    assert steps == [(pytest.approx(rate), 0.9, 0) for rate in rates]
    augmented = "sgd-mct" not in flags
    assert views == ({0.2} if augmented else set())
    assert jitters == ({0.0} if augmented else set())


def test_the_recipe_of_layers(folder, tmp_path, monkeypatch):
    """DeeperCluster's: C-13 has twice the rate, which falls as 1 / sqrt(1 + lr * decay * t)."""
    steps, step = [], torch.optim.SGD.step

    def recorded(self):
        assert all(g["momentum"] == 0.9 and g["weight_decay"] == 1e-5 for g in self.param_groups)
        steps.append([group["lr"] for group in self.param_groups])
        step(self)

    monkeypatch.setattr(torch.optim.SGD, "step", recorded)
    flags = f"--protocol {LAYERS} --epochs 1 --lr 5 --weights random --arch vgg16_bn"
    evaluate(tmp_path, folder, flags)
    second = 5 / math.sqrt(1 + 5e-5)
    rates = [[5, 5, 10], [second, second, 10 / math.sqrt(1 + 10e-5)]]
    assert steps == [pytest.approx(row) for row in rates]


def test_a_stopped_linear_layer_resumes(folder, tmp_path):
    """sgd-virtex killed in its third epoch ends with the score of one that was not.

    With other flags or another backbone it starts anew; one that diverges is refused.
    """
    weights = tmp_path / "backbone.pth"
    torch.save(eval_linear.load_backbone("random", "resnet18", 0).state_dict(), weights)
    flags = f"--weights {weights} --protocol sgd-virtex --batch-size 16 --epochs 4"
    whole = evaluate(tmp_path / "whole", folder, flags)
    killed = tmp_path / "killed"
    with interrupted(eval_linear, "classification_loss", call=6):  # of eight
        evaluate(killed, folder, flags)
    output = run_here(command(killed, folder, flags))
    assert "linear_0.pth: resuming from iteration 4" in output and result(killed)["mean"] == whole
    assert "resuming from iteration 8" in run_here(command(killed, folder, flags))  # it has ended
    assert result(killed)["mean"] == whole
    for other in (f"{flags} --lr 0.2", f"{flags} --train-images 30", flags):
        assert "resuming" not in run_here(command(killed, folder, other))
        os.utime(weights, (1, 1))  # of the last command the backbone is another
    flags += "0 --train-images 16 --lr 1e38"
    assert "has diverged: try a lower --lr" in refusal(command(tmp_path / "fast", folder, flags))


def test_costs(folder, tmp_path, monkeypatch):
    """svm-virtex: four. svm-icmlm: 40, drawn by the seed, log-uniform between 1e-5 and 1e5."""
    asked = []

    def recorded(x, positive, costs):
        asked.append(costs)
        return np.zeros((len(costs), positive.shape[1]))

    monkeypatch.setattr(svm, "cross_validate", recorded)
    evaluate(tmp_path, folder)
    evaluate(tmp_path, folder, "--protocol svm-icmlm --runs 2")
    four, first, second = asked
    assert four == COSTS and not set(first) & set(second)
    for costs in (first, second):
        powers = np.log10(costs)
        assert len(costs) == 40 and (np.diff(powers) > 0).all() and abs(powers).max() <= 5
        assert np.histogram(powers, 5, (-5, 5))[0].min() >= 3


def test_linear_layers_are_trained_apart():
    """Beside another that diverges a layer is what it is alone; each has its own weight decay."""
    rng, weights = np.random.default_rng(0), []
    x, y = rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 3, 40)
    rows = np.arange(40)
    for trials in ([(0.5, 0.0)], [(0.5, 0.0), (1e30, 1e-5)], [(0.5, 0.1)]):
        torch.manual_seed(0)
        layers = eval_linear.train_linear(
            x, y, rows, trials, lambda fraction: 1 - fraction, 4, 16, CPU, 0
        )
        weights.append(layers[0].weight)
    assert torch.equal(weights[0], weights[1]) and not torch.allclose(weights[0], weights[2])
    unit = eval_linear.l2_normalize(x[:30])
    for features, normalize in ((x, True), (unit, False)):
        torch.manual_seed(0)
        [layer] = eval_linear.train_linear(
            features,
            y,
            rows[:30],
            [(0.5, 0.0)],
            lambda fraction: 1 - fraction,
            4,
            16,
            CPU,
            0,
            normalize,
        )
        weights.append(layer.weight)
    torch.testing.assert_close(weights[3], weights[4])
    [layer] = eval_linear.LinearLayers([400], 50)  # N(0, 0.01) and bias 0 [VirTex App. A.1]
    assert layer.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert abs(layer.weight.mean()) < 1e-3 and not layer.bias.any()


def test_logreg_searches_on_held_out_images(monkeypatch):
    """25 trials on four fifths, batches of 1024; the best for the other fifth is trained on all.

    [ICMLM App. F.2]: learning rates log-uniform in [0.1, 100], decays uniform in [0, 1e-5].
    """
    rng, calls = np.random.default_rng(0), []
    y = rng.integers(0, 2, 50)
    x = (7 * np.eye(2)[y] + rng.normal(size=(50, 2))).astype(np.float32)

    def trained(x, y, rows, trials, factor, epochs, batch_size, device, seed, normalize):
        calls.append((rows, trials, [factor(fraction) for fraction in (0, 0.5, 1)]))
        assert normalize and (epochs, batch_size) == (100, 1024)
        signs = [-1] * len(trials)
        signs[17 % len(trials)] = 1  # only trial 17 knows the classes, and the one of the end
        return [partial(predicted, sign) for sign in signs]

    def predicted(sign, x):
        assert np.linalg.norm(x, axis=1) == pytest.approx(1, abs=1e-5)
        return sign * x

    monkeypatch.setattr(eval_linear, "train_linear", trained)
    flags = [*RANDOM, "--protocol", "logreg-icmlm", "--data", "folder"]
    args = eval_linear.get_args(flags)
    assert eval_linear.logreg_icmlm(x, y, x, y, "ab", args, CPU, 3) == {"top-1": 100}
    (fit, trials, factors), (everything, final, _) = calls
    assert len(trials) == 25 and final == [trials[17]] and factors == pytest.approx([1, 0.5, 0])
    assert len(set(fit)) == 40 and len(set(everything)) == 50
    rates, decays = np.array(trials).T
    assert 0.1 <= rates.min() < 1 and 10 < rates.max() <= 100
    assert 0 <= decays.min() < 3e-6 and 7e-6 < decays.max() <= 1e-5


def test_layers_are_the_last_three_convolutions():
    """C-11, C-12 and C-13 of torchvision's VGG-16, after ReLU, averaged over 3x3 places"""
    torch.manual_seed(0)
    backbone = common.build_backbone("vgg16_bn").eval()
    theirs = torchvision.models.vgg16_bn().eval()
    theirs.features.load_state_dict(backbone.features.state_dict())
    maps, modules = [], theirs.features
    convolutions = [n for n, module in enumerate(modules) if isinstance(module, nn.Conv2d)]
    for n in convolutions[-3:]:
        modules[n + 2].register_forward_hook(lambda _, given, output: maps.append(output.clone()))
    images = torch.randint(0, 256, (2, 128, 128, 3), dtype=torch.uint8)
    jitter = torch.tensor([[1.3, 0.7, 1.2, 0.05], [0.8, 1.1, 0.9, -0.1]])
    features = eval_linear.convolution_features(backbone, images, CPU, jitter=jitter)
    with torch.no_grad():
        modules(common.augment(images, jitter))
    for found, expected in zip(features, maps, strict=True):
        cells = expected[..., :6, :6].reshape(2, 512, 2, 3, 2, 3).mean((3, 5))
        torch.testing.assert_close(found, cells.flatten(1))


def test_loss_with_several_labels():
    """Binary cross-entropy summed over classes, mean over images; difficult ones do not count."""
    rng, expected = np.random.default_rng(0), 0
    logits, labels = rng.normal(size=(4, 5)), rng.integers(-1, 2, (4, 5))
    for logit, label in zip(logits.flat, labels.flat):
        p = 1 / (1 + math.exp(-logit))
        expected -= {1: math.log(p), 0: math.log(1 - p), -1: 0}[int(label)] / 4
    given = torch.from_numpy(logits), torch.from_numpy(labels)
    assert eval_linear.classification_loss(*given, True).item() == pytest.approx(expected)


def test_one_label_per_image_in_both_shapes():
    """Indices or one-hot rows: the same loss and top-1"""
    logits, classes = np.log([[0.7, 0.2, 0.1], [0.3, 0.2, 0.5]]), np.array([0, 1])
    for labels in (classes, np.eye(3, dtype=np.int8)[classes]):
        assert eval_linear.top1(logits, labels) == 50
        given = torch.from_numpy(logits), torch.from_numpy(labels)
        loss = eval_linear.classification_loss(*given, False).item()
        assert loss == pytest.approx(-(math.log(0.7) + math.log(0.2)) / 2)


def test_augmented_photos_bring_their_classes(tmp_path, capfd):
    """Also where one cannot be decoded: it is named, and the next comes as what it is."""
    broken = write_folder(tmp_path, 2) / "train" / "blue" / "1.png"
    broken.write_text("no picture")
    data = eval_linear.label_data("folder", tmp_path, "train")
    args = SimpleNamespace(image_size=32, crop_min=0.2, colour_jitter=0.0)
    samples = common.Samples(partial(eval_linear.labelled_photo, data, args), 4)
    for index, label in enumerate([0, 1, 1, 1]):
        sample = samples[0, index]
        red, _, blue = sample["image"].mean((0, 1))
        assert sample["labels"] == label == (red > blue)
    assert not np.array_equal(samples[0, 0]["image"], samples[1, 0]["image"])
    flags = "--protocol sgd-virtex --batch-size 4 --epochs 2"
    run_here(command(tmp_path / "out", tmp_path, flags))
    assert capfd.readouterr().err.count(f"cannot decode {broken}") == 1


# ---------------------------------------------------------------------- features extracted once


def test_pooling_in_2x2_parts():
    """ICMLM App. F.2 [Goyal et al. 2019]: 7x7 maps in four parts of 6x6 places"""
    images = torch.randint(0, 256, (1, 7, 7, 3), dtype=torch.uint8)
    expected = []
    for channel in common.augment(images)[0]:
        for rows in (channel[:6], channel[1:]):
            expected += [rows[:, :6].mean(), rows[:, 1:].mean()]
    found = eval_linear.pooled(nn.Identity(), images, CPU, grid_size=2)
    torch.testing.assert_close(found[0], torch.stack(expected))


@pytest.fixture
def extracted(monkeypatch):
    """What the command extracts: [(features, labels), ...]"""
    calls, extract = [], eval_linear.labelled_features
    recorded = lambda *given: calls.append(extract(*given)) or calls[-1]
    monkeypatch.setattr(eval_linear, "labelled_features", recorded)
    return calls


@pytest.mark.parametrize(
    "protocol, side, grid_size",
    [
        ("svm-virtex", 224 / 256, 1),
        ("svm-icmlm", 1, 2),
        ("sgd-mct --epochs 1", 224 / 256, 1),
        ("logreg-icmlm --epochs 1", 1, 1),
    ],
)
def test_what_is_extracted(protocol, side, grid_size, folder, tmp_path, extracted):
    """Crop and pooling of each paper, from training and test images alike, by the weights given.

    Here those are in a file as DINO's, which keeps its arguments in an object. No file is left.
    """
    backbone = common.build_backbone("resnet18").eval()
    state = {f"backbone.{key}": value for key, value in backbone.state_dict().items()}
    torch.save({"teacher": state, "args": argparse.Namespace(lr=1)}, tmp_path / "dino.pth")
    flags = f"--weights {tmp_path}/dino.pth --image-size 64 --protocol {protocol}"
    evaluate(tmp_path / "out", folder, flags)
    box = 20 - 20 * side, 20 - 20 * side, 20 + 20 * side, 20 + 20 * side
    for split, (features, labels) in zip(("train", "val"), extracted, strict=True):
        image = Image.open(folder / split / "red" / "0.png")
        pixels = torch.from_numpy(np.array(image.resize((64, 64), Image.BILINEAR, box)))[None]
        [expected] = eval_linear.pooled(backbone, pixels, CPU, grid_size=grid_size)
        assert isinstance(features, np.memmap) and features.shape == (32, 512 * grid_size**2)
        assert labels[16] == 1
        np.testing.assert_allclose(features[16], expected, rtol=1e-3, atol=1e-4)
    assert files_in(tmp_path / "out") == {"result.json"}


def test_features_are_extracted_once(folder, tmp_path, extracted):
    """For all --runs, unless their images or their backbones are others"""
    weights = tmp_path / "backbone.pth"
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    for flags, counts in (
        ("--protocol svm-icmlm", [32, 32]),
        ("--train-images 20", [20, 32, 20]),
        ("--hold-out 0.25", [24, 8, 24, 8]),
        ("--weights random --arch resnet18 --train-images 30", [30, 32, 30, 32]),
    ):
        flags = flags if "--weights" in flags else f"--weights {weights} {flags}"
        evaluate(tmp_path / "out", folder, f"{flags} --runs 2")
        assert [len(features) for features, _ in extracted] == counts
        extracted.clear()


def test_each_run_draws_its_images(folder, tmp_path):
    """--train-images and --hold-out by the seed of the run, which the score follows.

    What is held out is not trained on, and no test image is read.
    """
    data = eval_linear.label_data("folder", folder, "train")
    draws = []
    for seed in range(2):
        args = SimpleNamespace(hold_out=0.25, train_images=None)
        train, test = eval_linear.draw_images(data, None, args, seed)
        assert (len(train.images), len(test.images)) == (24, 8)
        assert sorted([*train.images, *test.images]) == sorted(data.images)
        assert [path.split("/")[-2] for path in test.images] == [data.names[k] for k in test.labels]
        draws.append(list(test.images))
        args.train_images = 10
        fewer, same = eval_linear.draw_images(data, None, args, seed)
        assert len(fewer.images) == 10 and set(fewer.images) < set(train.images)
        assert list(same.images) == draws[seed]
    assert draws[0] != draws[1]
    weights = tmp_path / "backbone.pth"
    torch.save(common.build_backbone("resnet18").state_dict(), weights)
    flags = f"--weights {weights} --hold-out 0.5 --val-split nowhere"
    run_here(command(tmp_path, folder, f"{flags} --runs 2 --protocol sgd-mct --epochs 1 --lr 1e-9"))
    first, second = result(tmp_path)["runs"]
    assert first != second


def test_early_stopping(folder, tmp_path):
    """model_N.pth and checkpoint.pth as --weights: their backbone, scored on held-out images"""
    backbone = common.build_backbone("resnet18")
    torch.save(backbone.state_dict(), tmp_path / "backbone.pth")
    model = {f"backbone.{name}": value for name, value in backbone.state_dict().items()}
    model["head.weight"] = torch.zeros(3, 3)
    content = {"script": "tp", "args": {"arch": "resnet18"}, "iteration": 5, "model": model}
    scores = []
    for name in ("backbone.pth", "model_5.pth", "checkpoint.pth"):
        if name != "backbone.pth":
            torch.save(content, tmp_path / name)
        flags = f"--weights {tmp_path / name} --hold-out 0.25"
        scores.append(evaluate(tmp_path / "out", folder, flags))
    assert scores[0] == scores[1] == scores[2]


def test_features_are_written_batch_by_batch(tmp_path, monkeypatch):
    """Into a temporary file: readable images move up in it."""
    images = common.ImageFiles(f"{n}.png" for n in range(200))

    def read(images, index, crops, size):
        if index % 3 == 0:
            raise common.Unreadable(images[index])
        return [np.full((size, size, 3), index, np.uint8)]

    monkeypatch.setattr(common, "read_crops", read)
    function = lambda pixels: pixels[:, 0, 0].float()
    args = SimpleNamespace(image_size=2, workers=0, output=tmp_path)
    rows, readable = eval_linear.run_over_images(function, images, args, ALONE)
    assert readable.tolist() == [n for n in range(200) if n % 3]
    assert np.array_equal(rows, np.stack(3 * [readable], 1)) and not files_in(tmp_path)
    monkeypatch.setattr(common, "read_crops", lambda images, *_: read(images, 0, None, 2))
    with pytest.raises(common.Unreadable, match="none of the 200 images can be decoded"):
        eval_linear.run_over_images(function, images, args, ALONE)


def extract_here(root, output):
    """The training features of an image folder, in this process -> as extract_features"""
    world = common.init_distributed()
    torch.manual_seed(0)
    backbone = common.build_backbone("resnet18")
    images = eval_linear.label_data("folder", root, "train").images
    args = SimpleNamespace(image_size=32, workers=0, output=output, amp="off")
    features, readable = eval_linear.extract_features(backbone, images, args, world)
    common.end_distributed(world)
    return None if features is None else np.array(features), readable


def test_what_cannot_be_decoded_and_two_processes(tmp_path):
    """A broken photo and a broken link are left out, by name.

    Two processes extract what one does, also from an odd number of images; and a linear layer
    that both train is as good.
    """
    blue, two = tmp_path / "train" / "blue", tmp_path / "two"
    write_folder(tmp_path, 9)
    (blue / "3.png").write_text("no picture")
    (blue / "link.png").symlink_to(tmp_path / "nowhere.png")
    output = run_here(command(tmp_path / "alone", tmp_path))
    for name in ("3.png", "link.png"):
        assert f"cannot decode {blue}/{name}: left out" in output
    features, readable = extract_here(tmp_path, tmp_path)
    assert len(features) == 17 and readable.tolist() == [0, 1, 2, *range(4, 9), *range(10, 19)]
    (first, rows), (second, same_rows) = in_two_processes(extract_here, tmp_path, tmp_path)
    assert second is None and np.array_equal(rows, readable) and np.array_equal(rows, same_rows)
    np.testing.assert_allclose(first, features, rtol=1e-4, atol=1e-5)
    flags = "--protocol sgd-virtex --batch-size 16 --epochs 9"
    output = finished(run_script(*TORCHRUN, *command(two, tmp_path, flags))).stdout
    assert output.count("epoch 5.1: top-1") == 1 and result(two)["mean"]["top-1"] > 95


# --------------------------------------------------------------------------------------- weights


def test_imagenet_weights(tmp_path, monkeypatch):
    """Offline one line says so; torchvision's file is used where torchvision would keep it."""

    def no_network(*_, **__):
        raise urllib.error.URLError("no such host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "urlopen", no_network)
    message = refusal(command(tmp_path, "nowhere", "--weights imagenet --arch resnet18"))
    assert "no such host" in message and "--weights imagenet is torchvision's" in message
    state = torchvision.models.resnet18().state_dict()
    torch.save(state, tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    loaded = eval_linear.load_backbone("imagenet", "resnet18", 0)
    assert torch.equal(loaded.conv1.weight, state["conv1.weight"])


# ----------------------------------------------------------------------------------- the refused

REFUSED = [
    ("--data voc07 --protocol sgd-virtex", "--protocol sgd-virtex wants one label per image"),
    ("--data coco --protocol sgd-mct", "--protocol sgd-mct wants one label per image"),
    ("--data shapes --protocol logreg-icmlm", "--protocol logreg-icmlm wants one label per image"),
    ("--data imagenet", "imagenet"),
    ("--protocol knn", "argument --protocol: invalid choice: 'knn'"),
    ("--weights random", "--weights random needs --arch"),
    ("--weights imagenet", "--weights imagenet needs --arch"),
    ("--epochs 5", "--protocol svm-virtex has no epochs"),
    ("--protocol logreg-icmlm --lr 1", "--protocol logreg-icmlm has no lr"),
    ("--weights no.pth", "'no.pth'; train one with python virtex.py, or give another --weights"),
    ("--protocol layers", "--protocol layers is for VGG-16: --arch vgg16_bn"),
    ("--protocol layers --arch vgg16_bn", "--protocol layers pools maps of 3x3 and more"),
    ("--weights resnet18.pth --protocol layers --image-size 48", "a resnet18, not --arch vgg16_bn"),
    ("--weights resnet18.pth --runs 2", "--protocol svm-virtex gives all --runs the same score"),
    ("--val-split valid", "an image folder holds valid/<class>/<image>"),
    ("--train-images 1", "no class has positive and negative training images"),
    ("--protocol sgd-virtex --batch-size 16 --epochs 2 --lr 1e38", "the linear layer has diverged"),
    ("--protocol sgd-mct --lr 1e38", "the linear layer has diverged: try a lower --lr"),
]


@pytest.mark.parametrize("flags, message", REFUSED)
def test_refused(flags, message, folder, tmp_path):
    torch.save(common.build_backbone("resnet18").state_dict(), tmp_path / "resnet18.pth")
    flags = flags.replace("resnet18.pth", f"{tmp_path}/resnet18.pth")
    assert message in refusal(command(tmp_path, folder, flags))


def test_refused_for_what_is_around(folder, tmp_path, monkeypatch):
    """No folder to write to; three processes"""
    (tmp_path / "file").touch()
    message = refusal(command(tmp_path / "file", folder))
    assert f"File exists: '{tmp_path}/file'" in message
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = refusal(command(tmp_path, folder, "--protocol sgd-mct --batch-size 16"))
    assert "--batch-size 16 cannot be divided by 3 processes" in message


# ------------------------------------------------------------------------------------- the probe


@pytest.fixture
def captioned(coco_folder):
    """Training and validation CaptionData, with tags"""
    splits = "train2017", "val2017"
    return [common.caption_data("coco", str(coco_folder), split) for split in splits]


def build_probe(data, output=None, trained_on_tags=False, **flags):
    args = {"probe_data": None, "probe_root": None, "probe_images": None, "output": output}
    args |= {"data": "own/photos.jsonl", "seed": 3, "arch": "resnet18"}
    args |= {"image_size": 32, "amp": "off", "workers": 0}
    return eval_linear.Probe(SimpleNamespace(**args | flags), *data, trained_on_tags)


def test_labels_of_the_probe(captioned, folder):
    """The tags, at most probe_images training images; or those of --probe-data"""
    train, val = captioned
    fit, test = build_probe(captioned, probe_images=10).labelled
    paths = list(train.images)
    assert len(set(fit.images)) == 10 and list(test.images) == list(val.images)
    for path, row in zip(fit.images, fit.labels, strict=True):
        assert np.flatnonzero(row).tolist() == train.tags_of(paths.index(path))
    probe = build_probe(captioned, probe_data="folder", probe_root=folder)
    fit, test = probe.labelled
    assert probe.name == "folder" and fit.names == ["blue", "red"]
    assert "/train/" in fit.images[0] and "/val/" in test.images[0]
    probe = build_probe(captioned, probe_data=str(write_jsonl(folder)))
    assert probe.name == "photos.jsonl" and probe.labelled[0].labels.shape == (32, 2)


def test_nothing_to_probe_on(captioned, tmp_path, capsys):
    """That is said, with the command that measures."""
    train, val = captioned
    untagged = common.CaptionData(train.images)
    different = write_folder(tmp_path)
    (different / "val" / "blue").rename(different / "val" / "pink")
    nothing = "no class of photos.jsonl has examples in both splits"
    for data, message in (([untagged, untagged], ""), ([train.select([0]), val], nothing)):
        assert build_probe(data).final(None, tmp_path, CPU) == {}
        output = capsys.readouterr().out
        expected = f"python eval_linear.py --weights {tmp_path}/backbone.pth --image-size 32"
        assert expected in output and message in output
    with pytest.raises(SystemExit, match="the splits have different classes: .'blue', 'pink'"):
        build_probe(captioned, probe_data="folder", probe_root=different)


@pytest.mark.parametrize("same", (False, True))
def test_final_probe(captioned, coco_folder, tmp_path, capsys, same):
    """What svm-virtex measures, of the trained backbone and of a random one

    The trained one keeps its mode and its statistics. It is said if its tags were trained on.
    """
    trained = common.build_backbone("resnet18")
    common.save_weights(tmp_path / "backbone.pth", trained)
    scores = []
    for weights in (tmp_path / "backbone.pth", "random"):
        flags = f"--weights {weights} --arch resnet18 --seed 3"
        scores.append(round(evaluate(tmp_path, coco_folder, flags, "coco")["mAP"], 2))
    one, other = scores
    assert one != other
    expected = {"data": "photos.jsonl", "metric": "mAP", "trained": one, "random": other}
    probe = build_probe(captioned, tmp_path, trained_on_tags=same)
    capsys.readouterr()
    assert probe.final(trained, tmp_path, CPU) == {"probe": expected}
    assert trained.training and not trained.bn1.num_batches_tracked
    name = "photos.jsonl (trained on the same tags)" if same else "photos.jsonl"
    line = f"{one:.1f} mAP trained, {other:.1f} mAP at random initialisation"
    assert capsys.readouterr().out == f"linear probe on {name}: {line}\n"
    other_tags = {"probe_data": "coco", "probe_root": coco_folder}
    assert not build_probe(captioned, trained_on_tags=True, **other_tags).same_tags
