"""eval_linear.py: the SVMs, labelled images, each protocol on small images, and the probe."""

import argparse
import math
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
    finished,
    in_two_processes,
    interrupted,
    refusal,
    result,
    run_here,
    run_script,
)
from PIL import Image
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC
from torch import nn

import common
import eval_linear
import shapes

RANDOM = "--weights", "random", "--arch", "resnet18"


def command(output, root, flags="", data="folder"):
    """eval_linear.py on small images; the weights are random unless the flags name others."""
    words = ["eval_linear.py", "--output", output, "--data", data, "--root", root]
    weights = () if "--weights" in flags else RANDOM
    return [*words, "--image-size", 32, "--workers", 0, *weights, *flags.split()]


def evaluate(*given):
    """Run the command -> {class or metric: mean score}"""
    run_here(command(*given))
    return result(given[0])["mean"]


# ------------------------------------------------------------------------------------- the SVMs

COSTS = 0.01, 0.1, 1.0, 10.0  # [VirTex App. A.1]
quiet = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def features():
    """Features in which six classes are more or less visible, a tenth of the entries difficult.

    Class d has two positives, e none in testing, f none in training.
    """
    rng = np.random.default_rng(0)
    x, directions = rng.normal(size=(140, 12)).astype(np.float32), rng.normal(size=(12, 6))
    y = (x @ directions + 4 * rng.normal(size=(140, 6)) > 2).astype(np.int8)
    y[rng.random(y.shape) < 0.1] = -1
    train_y, test_y = y[:90], y[90:]
    train_y[:, 3] = 0
    train_y[:2, 3] = 1
    test_y[test_y[:, 4] == 1, 4] = 0
    train_y[train_y[:, 5] == 1, 5] = -1
    return x[:90], train_y, x[90:], test_y


def literal_svms(train_x, train_y, test_x, test_y, k):
    """Class k by scikit-learn, as VirTex App. A.1 has it -> its best cost, {cost: score}"""
    positive = (train_y[:, k] == 1).astype(int)  # difficult images are negatives in training
    easy = test_y[:, k] != -1  # and do not count in testing
    train_x = train_x / np.linalg.norm(train_x.astype(float), axis=1, keepdims=True)
    test_x = test_x[easy] / np.linalg.norm(test_x[easy].astype(float), axis=1, keepdims=True)
    validated, scores = {1.0: 0}, {}
    for cost in COSTS:
        svm = LinearSVC(C=cost, class_weight={1: 2, 0: 1}, max_iter=2000, random_state=0)
        if positive.sum() >= 3:
            folds = cross_val_score(svm, train_x, positive, cv=3, scoring="average_precision")
            validated[cost] = folds.mean()
        decisions = svm.fit(train_x, positive).decision_function(test_x)
        scores[cost] = 100 * average_precision_score(test_y[easy, k], decisions)
    return max(sorted(validated), key=validated.get), scores


@quiet
def test_svms_are_those_of_scikit_learn(features, monkeypatch):
    """The same cost and average precision. With two positives, too few to choose, the cost is 1.

    What does not fit in memory together is read and solved in parts, with the same result.
    """
    found, chosen = eval_linear.svm_probe(*features, "abcdef"), []
    assert list(found) == list("abcd")  # of e and f there is nothing to test or to learn
    for k, name in enumerate("abcd"):
        cost, scores = literal_svms(*features, k)
        chosen.append(cost)
        assert found[name] == pytest.approx(scores.pop(cost), abs=1e-9)
        assert any(abs(other - found[name]) > 1e-3 for other in scores.values()), "no choice"
    assert len(set(chosen[:3])) > 1 and chosen[3] == 1
    monkeypatch.setattr(eval_linear, "CHUNK", 1)
    monkeypatch.setattr(eval_linear, "BLOCK", 7)
    assert eval_linear.svm_probe(*features, "abcdef") == pytest.approx(found, abs=1e-9)


@quiet
@pytest.mark.parametrize("source, size, number", (("shapes", 32, 200), ("folder", 48, 300)))
def test_svms_on_features_of_a_backbone(source, size, number, request):
    """Of scenes and of real flowers: each class agrees with scikit-learn to 0.05 points."""
    root = request.getfixturevalue("real_data") / "flowers" if source == "folder" else None
    torch.manual_seed(0)
    backbone, given, features = common.build_backbone("resnet18"), [], []
    for seed, split in enumerate(("train", "val")):
        data = eval_linear.label_data(source, root, split)
        columns = eval_linear.label_columns(data.labels, np.arange(len(data.names)))
        counts = columns.sum(0).tolist()
        assert source == "shapes" or counts == 5 * [300 if split == "train" else 100]
        order = np.random.default_rng(seed).permutation(len(data.images))[:number]
        data = data.select(order)
        found, readable = eval_linear.extract_features(backbone, data.images, size, ALONE)
        given += found, data.labels[readable]
        features += found, columns[order][readable]
    found = eval_linear.svm_probe(*given, data.names)
    assert len(found) > 4
    for k, name in enumerate(data.names):
        cost, scores = literal_svms(*features, k)
        assert found[name] == pytest.approx(scores[cost], abs=0.05)


@pytest.mark.parametrize("width", (12, 150))  # fewer features than images, and more
@pytest.mark.parametrize("cost", (1e-5, 0.1, 10.0, 1e5))
@pytest.mark.parametrize("start", (None, 100.0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_solve_svms_finds_the_minimum(dtype, start, cost, width):
    """The loss is strictly convex: its gradient, written in loops, is zero only at the minimum.

    From any start; an example of cost zero is as good as absent. That of features in float32 is
    found, too.
    """
    rng = np.random.default_rng(width)
    features, positive = rng.normal(size=(60, width)), rng.random((60, 2)) < 0.3
    costs = np.full((60, 2), cost)
    costs[:7, 1] = 0
    [x] = eval_linear.blocks(features, CPU)
    axes = eval_linear.principal_axes(features)
    in_axes = (x @ axes).to(dtype)
    given = in_axes, torch.from_numpy(positive), torch.from_numpy(costs)
    start = start and torch.full((axes.shape[1], 2), start, dtype=torch.float64)
    solved = axes @ eval_linear.solve_svms(*given, start)
    x = (in_axes.double() @ axes.T).numpy()
    for k, w in enumerate(solved.T.numpy()):
        gradient, at_zero = w.copy(), np.zeros(width + 1)
        for i in range(60):
            sign, c = (1, 2 * costs[i, k]) if positive[i, k] else (-1, costs[i, k])
            gradient -= 2 * c * max(0, 1 - sign * w @ x[i]) * sign * x[i]
            at_zero -= 2 * c * sign * x[i]
        assert np.linalg.norm(gradient) <= 1.1e-5 * np.linalg.norm(at_zero)


def test_products_are_in_double_precision(monkeypatch):
    """Of features in float32, which are read in parts"""
    monkeypatch.setattr(eval_linear, "BLOCK", 16)
    torch.manual_seed(0)
    x, w, y = torch.randn(50, 40), torch.randn(40, 3).double(), torch.randn(50, 3).double()
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-13)
    close(eval_linear.times(x, w), x.double() @ w)
    close(eval_linear.times_transposed(x, y), x.double().T @ y)


def test_average_precisions():
    """Of the images where a class is not difficult, and of classes with a positive, in percent."""
    decisions = np.array([[3.0, 1, 7], [2, 2, 8], [1, 3, 9]])
    labels = np.array([[0, 0, 0], [1, -1, -1], [-1, 1, 0]], np.int8)
    scores = eval_linear.average_precisions(decisions, labels, "abc")
    assert scores == {"a": 50, "b": 100} and eval_linear.mean_of(scores) == 75


def test_interpolated_average_precision():
    """The best precision at each recall or a higher one, as Goyal et al. (2019) score VOC07"""
    rng = np.random.default_rng(0)
    truth, decision = (rng.random(30) < 0.3).astype(np.int8), rng.normal(size=30).round(1)
    precisions, recalls = [], []
    for threshold in sorted(set(decision), reverse=True):
        found = decision >= threshold
        precisions.append(truth[found].mean())
        recalls.append(truth[found].sum() / truth.sum())
    wanted, before = 0, 0
    for n, recall in enumerate(recalls):
        wanted += (recall - before) * max(precisions[n:])
        before = recall
    [score] = eval_linear.average_precisions(decision[:, None], truth[:, None], "a", True).values()
    [plain] = eval_linear.average_precisions(decision[:, None], truth[:, None], "a").values()
    assert score == pytest.approx(100 * wanted) and score > plain + 0.1


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
    assert eval_linear.label_columns(data.labels, [1, 0])[0].tolist() == [0, 1]
    assert data.select([4, 0]).labels.tolist() == [1, 0]


CAT, DOG = f"{LISTS}/cat_trainval.txt", f"{LISTS}/dog_trainval.txt"
BAD_DATA = [  # the source; its files, a line in each; words of the message
    ("voc07", {}, "holds no VOCdevkit/VOC2007/ImageSets/Main: give VOCdevkit's folder"),
    ("voc07", {f"{LISTS}/cat_test.txt": ""}, f"{LISTS} holds no <class>_trainval.txt"),
    ("voc07", {CAT: "5 -1\n7 yes"}, f"{CAT}, line 2: expected an image name and 1, -1 or 0"),
    ("voc07", {CAT: "5 1", DOG: "6 1"}, f"{DOG} lists other images than"),
    ("voc07", {CAT: "5 1"}, "1 of 1 images are missing, the first is"),
    ("folder", {}, "train not found: an image folder holds train/<class>/<image>"),
    ("folder", {"train/a/notes.txt": ""}, "train holds no image: an image folder holds"),
    ("folder", {"train/a/1.png": "", "val/b/1.png": ""}, "different classes: ['a', 'b'] in one"),
    ("folder", {"train/mAP/1.png": "", "val/mAP/1.png": ""}, "a class is called mAP or top-1"),
    ("folder", {"train/a/1.png": "", "val/a/1.png": ""}, "none of the 1 images can be decoded"),
]


@pytest.mark.parametrize("data, files, message", BAD_DATA)
def test_bad_data_are_refused(data, files, message, tmp_path):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert message in refusal(command(tmp_path / "out", tmp_path, data=data))


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
    backbone = common.build_backbone("vgg16" if "layers" in flags else "resnet18")
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
    flags = f"--weights random --arch vgg16 --protocol {LAYERS} --epochs 1"
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
    monkeypatch.setattr(common, "random_crop", lambda rng, s: views.add(s) or crop(rng, s))
    monkeypatch.setattr(common, "colour_jitter", lambda rng, s: jitters.add(s) or jitter(rng, s))
    evaluate(tmp_path, folder, f"{flags} --weights random --arch resnet18")
    assert steps == [(pytest.approx(rate), 0.9, 0) for rate in rates]
    augmented = "sgd-mct" not in flags
    assert views == ({(0.2, 1.0)} if augmented else set())
    assert jitters == ({0.0} if augmented else set())


def test_the_recipe_of_layers(folder, tmp_path, monkeypatch):
    """DeeperCluster's: C-13 has twice the rate, which falls as 1 / sqrt(1 + lr * decay * t)."""
    steps, step = [], torch.optim.SGD.step

    def recorded(self):
        assert all(g["momentum"] == 0.9 and g["weight_decay"] == 1e-5 for g in self.param_groups)
        steps.append([group["lr"] for group in self.param_groups])
        step(self)

    monkeypatch.setattr(torch.optim.SGD, "step", recorded)
    flags = f"--protocol {LAYERS} --epochs 1 --lr 5 --weights random --arch vgg16"
    evaluate(tmp_path, folder, flags)
    second = 5 / math.sqrt(1 + 5e-5)
    rates = [[5, 5, 10], [second, second, 10 / math.sqrt(1 + 10e-5)]]
    assert steps == [pytest.approx(row) for row in rates]


def test_a_stopped_linear_layer_goes_on(folder, tmp_path, monkeypatch):
    """sgd-virtex killed in its third epoch ends with the score of one that was not; it diverges."""
    flags = "--protocol sgd-virtex --batch-size 16 --epochs 4"  # of two iterations each
    whole = evaluate(tmp_path / "whole", folder, flags)
    with interrupted(eval_linear, "classification_loss", call=6):
        evaluate(tmp_path / "killed", folder, flags)
    output = run_here(command(tmp_path / "killed", folder, flags))
    assert "going on from iteration" in output and result(tmp_path / "killed")["mean"] == whole
    assert "going on" not in run_here(command(tmp_path / "killed", folder, flags))  # it has ended
    assert "going on" not in run_here(command(tmp_path / "killed", folder, f"{flags} --lr 0.2"))
    other = f"{flags} --val-split train"  # its scores are not those of the first test images
    assert evaluate(tmp_path / "killed", folder, other) == evaluate(tmp_path / "o", folder, other)
    flags += "0 --train-images 16 --lr 1e38"  # 40 iterations; the epoch's score sees it first
    assert "has diverged: try a lower --lr" in refusal(command(tmp_path / "fast", folder, flags))
    monkeypatch.setattr(eval_linear, "score_layers", lambda *_: {})
    message = refusal(command(tmp_path / "fast", folder, flags))
    assert "has diverged at iteration 20: try a lower --lr" in message


def test_costs(folder, tmp_path, monkeypatch):
    """svm-virtex: four. svm-icmlm: 40, drawn by the seed, log-uniform between 1e-5 and 1e5."""
    asked = []

    def recorded(x, positive, costs):
        asked.append(costs)
        return np.zeros((len(costs), positive.shape[1]))

    monkeypatch.setattr(eval_linear, "cross_validate", recorded)
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
            x, y, rows, trials, lambda share: 1 - share, 4, 16, CPU, 0
        )
        weights.append(layers[0].weight)
    assert torch.equal(weights[0], weights[1]) and not torch.allclose(weights[0], weights[2])
    how = [(0.5, 0.0)], lambda share: 1 - share, 4, 16, CPU, 0
    for given in (
        (x, y, rows[:30], *how, True),
        (eval_linear.unit_length(x[:30]), y, rows[:30], *how),
    ):
        torch.manual_seed(0)
        weights.append(eval_linear.train_linear(*given)[0].weight)
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

    def trained(x, y, rows, trials, factor, epochs, batch_size, device, seed, unit):
        calls.append((rows, trials, [factor(share) for share in (0, 0.5, 1)]))
        assert unit
        signs = [-1] * len(trials)
        signs[17 % len(trials)] = 1  # only trial 17 knows the classes, and the one of the end
        return [partial(predicted, sign) for sign in signs]

    def predicted(sign, x):
        assert np.linalg.norm(x, axis=1) == pytest.approx(1, abs=1e-5)
        return sign * x

    monkeypatch.setattr(eval_linear, "train_linear", trained)
    assert eval_linear.logreg_icmlm(x, y, x, y, 100, 1024, CPU, 3) == {"top-1": 100}
    (fit, trials, factors), (everything, final, _) = calls
    assert len(trials) == 25 and final == [trials[17]] and factors == pytest.approx([1, 0.5, 0])
    assert len(set(fit)) == 40 and len(set(everything)) == 50
    rates, decays = np.array(trials).T
    assert 0.1 <= rates.min() < 1 and 10 < rates.max() <= 100
    assert 0 <= decays.min() < 3e-6 and 7e-6 < decays.max() <= 1e-5
    flags = [*RANDOM, "--protocol", "logreg-icmlm", "--data", "folder"]
    assert eval_linear.get_args(flags).batch_size == 1024


def test_layers_are_the_last_three_convolutions():
    """C-11, C-12 and C-13 of torchvision's VGG-16, after ReLU, averaged over 3x3 places"""
    torch.manual_seed(0)
    backbone, theirs = common.build_backbone("vgg16").eval(), torchvision.models.vgg16_bn().eval()
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


def test_augmented_photos_bring_their_classes(tmp_path):
    """Also where one cannot be decoded: it is named, and the next comes as what it is."""
    broken = write_folder(tmp_path, 2) / "train" / "blue" / "1.png"
    broken.write_text("no picture")
    data = eval_linear.label_data("folder", tmp_path, "train")
    make = lambda index, rng: eval_linear.labelled_photo(data, 32, 0.0, index, rng)
    samples = common.Samples(make, 4)
    for index, label in enumerate([0, 1, 1, 1]):
        sample = samples[0, index]
        red, _, blue = sample["image"].mean((0, 1))
        assert sample["labels"] == label == (red > blue)
    assert not np.array_equal(samples[0, 0]["image"], samples[1, 0]["image"])
    flags = "--protocol sgd-virtex --batch-size 4 --epochs 2"
    output = run_here(command(tmp_path / "out", tmp_path, flags))
    assert output.count(f"cannot decode {broken}") == 1


# ---------------------------------------------------------------------- features extracted once


def kept(output, split="train"):
    """Features and labels, as anybody reads them"""
    with np.load(output / f"features_{split}.npz") as file:
        labels = file["labels"]
    return np.load(output / f"features_{split}.npy")[: len(labels)], labels


def test_pooling_in_2x2_parts():
    """ICMLM App. F.2 [Goyal et al. 2019]: 7x7 maps in four parts of 6x6 places"""
    images = torch.randint(0, 256, (1, 7, 7, 3), dtype=torch.uint8)
    expected = []
    for channel in common.augment(images)[0]:
        for rows in (channel[:6], channel[1:]):
            expected += [rows[:, :6].mean(), rows[:, 1:].mean()]
    found = eval_linear.pooled(nn.Identity(), images, CPU, cells=2)
    torch.testing.assert_close(found[0], torch.stack(expected))


@pytest.mark.parametrize(
    "protocol, part, cells",
    [
        ("svm-virtex", 224 / 256, 1),
        ("svm-icmlm", 1, 2),
        ("sgd-mct --epochs 1", 224 / 256, 1),
        ("logreg-icmlm --epochs 1", 1, 1),
    ],
)
def test_what_is_extracted(protocol, part, cells, folder, tmp_path):
    """Crop and pooling of each paper, from training and test images alike, by the weights given.

    Here those are in a file as DINO's, which keeps its arguments in an object.
    """
    backbone = common.build_backbone("resnet18").eval()
    state = {f"backbone.{key}": value for key, value in backbone.state_dict().items()}
    torch.save({"teacher": state, "args": argparse.Namespace(lr=1)}, tmp_path / "dino.pth")
    flags = f"--weights {tmp_path}/dino.pth --image-size 64 --protocol {protocol}"
    evaluate(tmp_path, folder, flags)
    box = 20 - 20 * part, 20 - 20 * part, 20 + 20 * part, 20 + 20 * part
    for split, name in (("train", "train"), ("val", "test")):
        image = Image.open(folder / split / "red" / "0.png")
        pixels = np.array(image.resize((64, 64), Image.BILINEAR, box))
        [expected] = eval_linear.pooled(backbone, torch.from_numpy(pixels)[None], CPU, cells=cells)
        features, labels = kept(tmp_path, name)
        assert features.shape == (32, 512 * cells**2) and labels[16] == 1
        np.testing.assert_allclose(features[16], expected, rtol=1e-3, atol=1e-4)


def test_features_are_kept(folder, tmp_path, monkeypatch):
    """For the next run, command, and protocol with the same crop; damaged ones are made again."""
    extracted, extract = [], eval_linear.extract_features
    counted = lambda *given: extracted.append(len(given[1])) or extract(*given)
    monkeypatch.setattr(eval_linear, "extract_features", counted)
    torch.save(common.build_backbone("resnet18").state_dict(), tmp_path / "backbone.pth")
    flags = f"--weights {tmp_path}/backbone.pth --train-images 20 --runs 2"
    first = evaluate(tmp_path, folder, flags)
    assert evaluate(tmp_path, folder, flags) == first
    evaluate(tmp_path, folder, f"{flags} --protocol sgd-mct --epochs 1")
    assert extracted == [20, 32]
    (tmp_path / "features_train.npz").write_bytes(b"PK\x03\x04 and no more")
    assert "features_train.npz is damaged" in run_here(command(tmp_path, folder, flags))
    (tmp_path / "features_test.npy").unlink()
    run_here(command(tmp_path, folder, flags))
    assert result(tmp_path)["mean"] == first and extracted == [20, 32, 20, 32]
    features = tmp_path / "features_train.npy"
    features.write_bytes(features.read_bytes()[:-40])
    message = refusal(command(tmp_path, folder, flags))
    assert f"{features}: " in message and "Expected: what this command wrote: delete it" in message
    features.unlink()
    assert evaluate(tmp_path, folder, flags) == first


def test_a_stop_while_features_are_written(folder, tmp_path, monkeypatch):
    """The old ones stay as they were; a disk without room is named, with what is needed."""
    evaluate(tmp_path, folder)
    before = kept(tmp_path)[0]
    with interrupted(eval_linear, "pooled", call=1):
        evaluate(tmp_path, folder, "--train-images 30")
    assert np.array_equal(kept(tmp_path)[0], before)
    with interrupted(common, "keep_arrays", call=1):  # between the new features and their note
        evaluate(tmp_path, folder, "--train-images 30")
    evaluate(tmp_path, folder)
    assert np.array_equal(kept(tmp_path)[0], before)
    monkeypatch.setattr(eval_linear.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**4))
    message = refusal(command(tmp_path, folder, "--train-images 30"))
    assert f"{tmp_path}/features_train.npy needs 0.0 GB, and 0.0 are free: make room" in message
    assert np.array_equal(kept(tmp_path)[0], before)


FLAGS = "--seed 1", "--image-size 64", "--train-images 7", "--protocol svm-icmlm", "--amp bf16"


@pytest.mark.parametrize("flags", ("", *FLAGS))
def test_features_of_something_else_are_not_used(flags, tmp_path):
    """Other weights, size, list, crop or precision; without flags an image is another."""
    red = write_folder(tmp_path) / "train" / "red" / "3.png"
    evaluate(tmp_path, tmp_path)
    before, _ = kept(tmp_path)
    if not flags:
        Image.new("RGB", (40, 40)).save(red)
    evaluate(tmp_path, tmp_path, flags)
    assert not np.array_equal(before, kept(tmp_path)[0])


def test_labels_that_were_corrected_are_used(folder, tmp_path, monkeypatch):
    evaluate(tmp_path, folder)
    before, load = kept(tmp_path)[1], eval_linear.label_data
    swapped = lambda *given: load(*given)._replace(labels=1 - load(*given).labels)
    monkeypatch.setattr(eval_linear, "label_data", swapped)
    evaluate(tmp_path, folder)
    assert np.array_equal(kept(tmp_path)[1], 1 - before)


def test_features_are_written_batch_by_batch(tmp_path, monkeypatch):
    """Into the array that is asked for, without one copy: readable images move up in it."""
    images, arrays = common.ImageFiles(f"{n}.png" for n in range(200)), []

    def read(images, index, crops, size):
        if index % 3 == 0:
            raise common.Unreadable(images[index])
        return [np.full((size, size, 3), index, np.uint8)]

    def create(shape, dtype):
        arrays.append(np.empty(shape, dtype))
        return arrays[0]

    monkeypatch.setattr(common, "read_crops", read)
    describe = lambda pixels: pixels[:, 0, 0].float()
    found, readable = eval_linear.describe_images(describe, images, 2, ALONE, create=create)
    assert readable.tolist() == [n for n in range(200) if n % 3]
    assert np.array_equal(found, np.stack(3 * [readable], 1)) and np.shares_memory(found, arrays[0])


def test_memory_is_told_before_the_work(folder, tmp_path, monkeypatch):
    """COCO's svm-icmlm needs 8 GB; a machine with less says so, one with more does not."""
    told = []
    monkeypatch.setattr(eval_linear, "say", told.append)
    for pages in (10**6, 3 * 10**6):
        monkeypatch.setattr(
            eval_linear.os, "sysconf", {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": 4096}.get
        )
        eval_linear.warn_of_memory("svm-icmlm", 118_287, 8192, 80, CPU)
    what = "svm-icmlm on 118287 x 8192 features needs 9 GB of memory, and there are 4"
    assert told == [f"{what}: give fewer --train-images if it fails"]


def test_one_process_reads_the_dates_of_the_files(folder, tmp_path, monkeypatch):
    """The others do not need the checksum of a million files."""
    other = common.World(1, 2, CPU)
    data = eval_linear.label_data("folder", folder, "train")
    monkeypatch.setattr(eval_linear, "checksum", lambda *_: pytest.fail("asked for a checksum"))
    monkeypatch.setattr(common, "any_process", lambda world, flag: False)
    how = 32, 1.0, 1, "off", 0, other
    assert eval_linear.kept_features(tmp_path / "a.npy", None, data, *how) == (None, None)


def test_what_cannot_be_decoded_and_two_processes(tmp_path):
    """A broken photo and a broken link are left out, by name, and told again with kept features.

    Two processes extract what one does, also from an odd number of images; and a linear layer
    that both train is as good.
    """
    blue, alone, two = tmp_path / "train" / "blue", tmp_path / "alone", tmp_path / "two"
    write_folder(tmp_path, 9)
    (blue / "3.png").write_text("no picture")
    (blue / "link.png").symlink_to(tmp_path / "nowhere.png")
    output = run_here(command(alone, tmp_path))
    for name in ("3.png", "link.png"):
        assert f"cannot decode {blue}/{name}: left out" in output
    left_out = "2 of 19 images could not be decoded and are left out"
    assert left_out in run_here(command(alone, tmp_path))
    outputs = in_two_processes(run_here, command(two, tmp_path))
    assert "".join(outputs).count("mAP") == 1
    assert result(two)["mean"] == pytest.approx(result(alone)["mean"])
    for split, counts in (("train", [8, 9]), ("test", [9, 9])):
        (features, labels), found = kept(alone, split), kept(two, split)
        assert np.bincount(labels).tolist() == counts and np.array_equal(found[1], labels)
        np.testing.assert_allclose(found[0], features, rtol=1e-4, atol=1e-5)
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
    assert "--weights imagenet: the file cannot be downloaded" in message
    assert "no such host" in message
    state = torchvision.models.resnet18().state_dict()
    torch.save(state, tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    loaded = eval_linear.load_backbone("imagenet", "resnet18", 0)
    assert torch.equal(loaded.conv1.weight, state["conv1.weight"])


# ----------------------------------------------------------------------------------- the refused

REFUSED = [
    ("--data voc07 --protocol sgd-virtex", "--protocol sgd-virtex wants one label per image"),
    ("--data coco --protocol sgd-mct", "--protocol sgd-mct wants one label per image"),
    ("--data shapes --protocol logreg-icmlm", "--protocol logreg-icmlm wants one label per image"),
    ("--data imagenet", "argument --data: invalid choice: 'imagenet'"),
    ("--weights random", "--weights random needs --arch"),
    ("--weights imagenet", "--weights imagenet needs --arch"),
    ("--epochs 5", "--epochs, --batch-size and --lr do not go with --protocol svm-virtex"),
    ("--protocol logreg-icmlm --lr 1", "--lr does not go with --protocol logreg-icmlm"),
    ("--weights no.pth", "no.pth not found"),
    ("--protocol layers --image-size 48", "--protocol layers is for VGG-16, its last three"),
    ("--val-split valid", "valid not found: an image folder holds valid/<class>/<image>"),
    ("--train-images 1", "no class has both positive and negative training images"),
    ("--protocol logreg-icmlm --train-images 4", "holds out a fifth of the images: give it 5"),
    ("--protocol sgd-virtex --batch-size 16 --epochs 2 --lr 1e38", "the linear layer has diverged"),
    ("--protocol sgd-mct --lr 1e38", "the linear layer has diverged: try a lower --lr"),
]


@pytest.mark.parametrize("flags, message", REFUSED)
def test_refused(flags, message, folder, tmp_path):
    assert message in refusal(command(tmp_path, folder, flags))


def test_refused_for_what_is_around(folder, tmp_path, monkeypatch):
    """No folder to write to; three processes; features that are not finite"""
    (tmp_path / "file").touch()
    message = refusal(command(tmp_path / "file", folder))
    assert f"{tmp_path}/file: File exists" in message
    infinite = lambda backbone, images, **_: torch.full((len(images), 4), math.inf)
    monkeypatch.setattr(eval_linear, "pooled", infinite)
    assert "the features are not finite" in refusal(command(tmp_path, folder))
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = refusal(command(tmp_path, folder, "--protocol sgd-mct --batch-size 16"))
    assert "--batch-size 16 is for all 3 processes together and cannot be" in message


# ------------------------------------------------------------------------------------- the probe


@pytest.fixture
def captioned(coco_folder):
    """Training and validation CaptionData, with tags"""
    splits = "train2017", "val2017"
    return [common.caption_data("coco", str(coco_folder), split) for split in splits]


def build_probe(data, **flags):
    args = {"probe_data": None, "probe_root": None, "probe_images": None, "probe_every": 0}
    args |= {"data": "own/photos.jsonl", "seed": 3, "arch": "resnet18"}
    args |= {"image_size": 32, "amp": "off", "workers": 0}
    return eval_linear.Probe(SimpleNamespace(**args | flags), *data)


def start_run(folder):
    """In place of common.Run: what the probe takes of it"""
    save = lambda name, module: torch.save(module.state_dict(), folder / name)
    return SimpleNamespace(world=ALONE, folder=folder, iteration=0, best=None, save_weights=save)


def test_labels_of_the_probe(captioned, folder):
    """The tags, at most --probe-images training images; or those of --probe-data"""
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


def test_nothing_to_probe_on(captioned, tmp_path, capsys):
    """That is said, with the command that measures; --probe-every is refused."""
    train, val = captioned
    untagged = common.CaptionData(train.images)
    different = write_folder(tmp_path)
    (different / "val" / "blue").rename(different / "val" / "pink")
    cases = [
        ([untagged, untagged], "--probe-every needs labels and own/photos.jsonl has no tags: add"),
        ([train.select([0]), val], "no class of photos.jsonl has examples in both splits"),
    ]
    for data, message in cases:
        assert build_probe(data).final(None, start_run(tmp_path), False) == {}
        expected = f"python eval_linear.py --weights {tmp_path}/backbone.pth --image-size 32"
        assert expected in capsys.readouterr().out
        with pytest.raises(SystemExit, match=f"^error: {message}"):
            build_probe(data, probe_every=5)
    with pytest.raises(SystemExit, match="fifth of the probe's training images, too few to score"):
        build_probe(captioned, probe_every=5, probe_images=4)
    with pytest.raises(SystemExit, match="the splits have different classes: .'blue', 'pink'"):
        build_probe(captioned, probe_data="folder", probe_root=different)


def test_early_stopping(captioned, tmp_path, monkeypatch):
    """VirTex Sec. 3: the best by a fifth of the training images, never by test images, is kept."""
    probe, run = build_probe(captioned, probe_every=5), start_run(tmp_path)
    scores, seen = iter([30.0, 50.0, 50.0, 40.0]), []

    def score(backbone, fit, held, device):
        seen.append((list(fit.images), list(held.images)))
        return next(scores)

    monkeypatch.setattr(probe, "score", score)
    for run.iteration in (5, 10, 15, 20):
        run.best = probe.keep_best(nn.Linear(1, run.iteration), run)
    assert run.best == {"iteration": 10, "score": 50}
    assert len(torch.load(tmp_path / "backbone_best.pth")["bias"]) == 10
    fit, held = seen[0]
    assert len(held) == 4 and sorted(fit + held) == sorted(captioned[0].images)
    assert all(images == seen[0] for images in seen)


def test_final_probe(captioned, coco_folder, tmp_path, capsys):
    """What svm-virtex measures: of the trained backbone, of a random one, of the best of the run

    The trained one keeps its mode and its statistics.
    """
    probe, run = build_probe(captioned), start_run(tmp_path)
    trained = common.build_backbone("resnet18")
    run.save_weights("backbone.pth", trained)
    run.save_weights("backbone_best.pth", common.build_backbone("resnet18"))
    run.best = {"iteration": 7, "score": 12.5}
    scores = []
    for weights in (f"{tmp_path}/backbone.pth", "random", f"{tmp_path}/backbone_best.pth"):
        flags = f"--weights {weights} --arch resnet18 --seed 3"
        scores.append(round(evaluate(tmp_path, coco_folder, flags, "coco")["mAP"], 2))
    assert len(set(scores)) == 3
    one, other, best = scores
    expected = {"data": "photos.jsonl", "metric": "mAP", "trained": one, "random": other}
    expected["best"] = {**run.best, "trained": best}
    assert probe.final(trained, run, False) == {"probe": expected}
    assert trained.training and not trained.bn1.num_batches_tracked
    line = f"{one:.1f} mAP trained, {other:.1f} mAP at random initialisation"
    assert capsys.readouterr().out == f"linear probe on photos.jsonl: {line}\n"
