"""downstream/zeroshot.py: Eqs. 9 to 12, the scores, the published layouts, and the real script."""

import argparse
import math

import numpy as np
import pytest
import scipy.io
import torch
from conftest import CPU, in_two_processes, refusal, result, run_here

import common
import eval_linear
import shapes
from downstream import zeroshot

# ------------------------------------------------------------------------------ the bilinear score


def literal_score(sigma, b, x, a):
    """Eq. 9 in loops: f(x, a) = a'(Σx + b)"""
    total = 0.0
    for i in range(len(a)):
        row = b[i]
        for j in range(len(x)):
            row += sigma[i][j] * x[j]
        total += a[i] * row
    return total


def literal_loss(sigma, b, xs, ys, attributes):
    """Eqs. 11 and 12 in loops: the mean of -log p(y | x, A)"""
    losses = []
    for x, y in zip(xs, ys):
        scores = [literal_score(sigma, b, x, a) for a in attributes]
        p = math.exp(scores[y]) / sum(math.exp(score) for score in scores)
        losses.append(-math.log(p))
    return sum(losses) / len(losses)


@pytest.fixture
def problem():
    """20 classes, each with two of 9 attributes, 2 of them unseen; features of 20 numbers

    The features show the attributes of their class, which a linear map finds again.
    """
    rng = np.random.default_rng(0)
    pairs = np.array([[*np.eye(4)[k // 5], *np.eye(5)[k % 5]] for k in range(20)])
    classes = np.repeat(np.arange(20), 15)
    parts = np.tile([zeroshot.TRAIN] * 10 + [zeroshot.SEEN] * 5, 20)
    parts[np.isin(classes, (2, 9))] = zeroshot.UNSEEN
    x = pairs[classes] @ rng.normal(size=(9, 20)) + 0.02 * rng.normal(size=(300, 20))
    images, lengths = shapes.ShapeImages(range(300)), rng.uniform(0.5, 2, (20, 1))
    data = zeroshot.ZeroShotData(
        images, classes, parts, lengths * pairs, list("abcdefghijklmnopqrst")
    )
    return x.astype(np.float32), data


ARGS = argparse.Namespace(epochs=30, batch_size=32)


def test_equations(problem, monkeypatch):
    """Every loss that is minimised is Eq. 11 over the seen classes, every prediction is Eq. 10

    among all of them; both in loops, with the Σ and b that the layers hold at that time.
    """
    x, data = problem
    unit = data.attributes / np.linalg.norm(data.attributes, axis=1, keepdims=True)
    of_seen, calls = np.delete(unit, (2, 9), 0), []
    train_linear = eval_linear.train_linear

    def trained(x, labels, rows, trials, *how):
        layers, (width, loss) = train_linear(x, labels, rows, trials, *how), how[-2:]
        with torch.no_grad():
            found = float(loss(layers[0](torch.from_numpy(x[:9])), torch.arange(9)))
        sigma, b = (p.double().tolist() for p in (layers[0].weight, layers[0].bias))
        wanted = literal_loss(sigma, b, x[:9].tolist(), range(9), of_seen)
        assert width == 9 and found == pytest.approx(wanted, rel=1e-4)
        calls.append((len(rows), [lr for lr, _ in trials], sigma, b, labels[rows]))
        return layers

    monkeypatch.setattr(eval_linear, "train_linear", trained)
    predicted = zeroshot.predict_classes(x, data, ARGS, CPU, 0)
    (fit, rates, *_), (number, chosen, sigma, b, labels) = calls
    assert (fit, number) == (144, 180), "a fifth of 180 training images is held out, then all"
    assert len(rates) > 3 and len(chosen) == 1 and chosen[0] in rates
    assert labels.shape == (180,) and np.bincount(labels).tolist() == 18 * [10]
    for n in range(0, 300, 10):
        scores = [literal_score(sigma, b, x[n].tolist(), a) for a in unit]
        assert predicted[n] == max(range(20), key=lambda c: scores[c])


def test_unseen_classes_are_found(problem):
    """Where features show attributes, classes without training images are recognised, too."""
    x, data = problem
    predicted = zeroshot.predict_classes(x, data, ARGS, CPU, 0)
    scores = zeroshot.accuracies(predicted, data)
    assert scores["seen"] > 85 and scores["unseen"] > 85
    shuffled = np.random.default_rng(1).permutation(x)
    assert (
        zeroshot.accuracies(zeroshot.predict_classes(shuffled, data, ARGS, CPU, 0), data)["top-1"]
        < 40
    )


def test_learning_rate_is_chosen_on_held_out_images(problem, monkeypatch):
    """Rates that learn nothing and that diverge lose against one that works, wherever it stands."""
    x, data = problem
    for rates in (1e-7, 1e30, 3.0), (3.0, 1e30, 1e-7):
        monkeypatch.setattr(zeroshot, "RATES", rates)
        predicted = zeroshot.predict_classes(x, data, ARGS, CPU, 0)
        assert zeroshot.accuracies(predicted, data)["seen"] > 85


def test_accuracies():
    """In loops: the mean over classes is not the mean over images; training images do not count."""
    rng = np.random.default_rng(0)
    classes = np.sort(rng.integers(0, 6, 90) * rng.integers(0, 2, 90))  # class 0 is frequent
    parts = np.where(classes > 3, zeroshot.UNSEEN, rng.integers(0, 2, 90))
    predicted = np.where(rng.random(90) < 0.3 + 0.1 * classes, classes, 0)
    images = shapes.ShapeImages(range(90))
    data = zeroshot.ZeroShotData(images, classes, parts, np.eye(6), list("abcdef"))
    found = zeroshot.accuracies(predicted, data)

    of_part = {}
    for part in (zeroshot.SEEN, zeroshot.UNSEEN):
        shares = []
        for k in range(6):
            mine = [n for n in range(90) if classes[n] == k and parts[n] == part]
            if mine:
                shares.append(sum(int(predicted[n] == k) for n in mine) / len(mine))
        of_part[part] = 100 * sum(shares) / len(shares)
    tested = [n for n in range(90) if parts[n] != zeroshot.TRAIN]
    right = sum(int(predicted[n] == classes[n]) for n in tested)
    seen, unseen = of_part[zeroshot.SEEN], of_part[zeroshot.UNSEEN]
    assert found["top-1"] == pytest.approx(100 * right / len(tested))
    assert found["seen"] == pytest.approx(seen) and found["unseen"] == pytest.approx(unseen)
    assert found["harmonic mean"] == pytest.approx(2 / (1 / seen + 1 / unseen))
    assert len({round(score, 6) for score in found.values()}) == 4, "nothing tells them apart"
    nothing = zeroshot.accuracies(np.full(90, -1), data)
    assert set(nothing.values()) == {0}


def test_features_of_vgg():
    """After each of the last three convolutions, of unit length; unreadable images are left out."""
    args = argparse.Namespace(image_size=48, workers=0, amp="off")
    data = zeroshot.shape_pairs().select([0, 1])
    world = common.World(0, 1, CPU)
    layers, kept = zeroshot.layer_features("random", "vgg16", 3, data, args, world)
    assert list(layers) == ["C-11", "C-12", "C-13"] and len(kept.images) == 2
    backbone = eval_linear.load_backbone("random", "vgg16", 3).eval()
    pixels = [
        common.read_crops(data.images, i, [common.centre_crop(224 / 256)], 48)[0] for i in (0, 1)
    ]
    maps, last = common.augment(torch.from_numpy(np.stack(pixels))), []
    with torch.no_grad():
        for module in backbone.features:
            maps = module(maps)
            if isinstance(module, torch.nn.ReLU):
                last.append(maps.mean((2, 3)))  # 3x3 places at 48 pixels
    for found, wanted in zip(layers.values(), last[-3:]):
        wanted = torch.nn.functional.normalize(wanted).numpy()
        assert np.allclose(found, wanted, atol=1e-5)


# ------------------------------------------------------------------------------------------ data


def test_shape_pairs():
    """One object each; unseen pairs are never trained on, their shapes and colours are."""
    data = zeroshot.shape_pairs()
    assert data.attributes.shape == (64, 16) and (data.attributes.sum(1) == 2).all()
    names = [*shapes.SHAPES, *shapes.COLOURS]
    for i, k in enumerate(data.classes):
        [o] = shapes.objects_of(data.images[i])
        assert data.names[k] == f"{o.colour} {o.shape}"
        assert {names[n] for n in np.flatnonzero(data.attributes[k])} == {o.colour, o.shape}
    trained, seen, unseen = [set(data.classes[data.parts == part]) for part in range(3)]
    assert len(unseen) == 16 and not trained & unseen and seen <= trained
    assert (data.attributes[sorted(trained)].sum(0) == 6).all()  # each in 6 pairs
    train = [data.images[i] for i in np.flatnonzero(data.parts == zeroshot.TRAIN)]
    assert set(train) < set(shapes.SPLITS["train"])
    test = [data.images[i] for i in np.flatnonzero(data.parts != zeroshot.TRAIN)]
    assert set(test) < set(shapes.SPLITS["val"])


PHOTOS = {"cub": "CUB_200_2011/images", "awa2": "Animals_with_Attributes2/JPEGImages"}
FOLDERS = {"cub": "CUB", "awa2": "AWA2"}
CLASSES = "001.Red_cap", "killer+whale", "003.Moon", "ox"  # trained, unseen, trained, trained


def column(strings):
    """A MATLAB cell array of strings, (N, 1)"""
    cells = np.empty((len(strings), 1), object)
    cells[:, 0] = strings
    return cells


def publish(root, name, **changed):
    """12 images of each of four classes in the published layout, as MATLAB would save them

    changed: variables of the two files that are another's, None for none.
    """
    folder, photos = root / "xlsa17" / "data" / FOLDERS[name], root / PHOTOS[name]
    folder.mkdir(parents=True)
    files, labels = [], []
    for n in range(48):  # the classes in turns
        k = n % 4
        (photos / CLASSES[k]).mkdir(parents=True, exist_ok=True)
        shapes.draw(n, 48).save(photos / CLASSES[k] / f"{n}_a.jpg")
        files.append(f"/home/someone/my images//{PHOTOS[name]}/{CLASSES[k]}/{n}_a.jpg")
        labels.append([k + 1])
    one = [n + 1 for n in range(48)]
    att = np.array([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 1.0]])
    content = {
        "image_files": column(files),
        "labels": np.array(labels, np.uint8),
        "features": np.zeros((2048, 3)),
        "allclasses_names": column(CLASSES),
        "att": att / np.linalg.norm(att, axis=0),
        "original_att": att,
        "trainval_loc": np.array([[i] for i in one[:32] if i % 4 != 2], np.uint16),
        "test_seen_loc": np.array([[i] for i in one[32:46] if i % 4 != 2], float),
        "test_unseen_loc": np.array([[i] for i in one if i % 4 == 2], float),
        **changed,
    }
    content = {key: value for key, value in content.items() if value is not None}
    images = ("image_files", "labels", "features")
    of_images = {key: content.pop(key) for key in images if key in content}
    scipy.io.savemat(folder / "res101.mat", of_images)
    scipy.io.savemat(folder / "att_splits.mat", content)
    return folder


@pytest.mark.parametrize("name", ("cub", "awa2"))
def test_published_layout(name, tmp_path):
    """MATLAB's indices and cell arrays, and the photos below the root wherever they were before."""
    publish(tmp_path, name)
    data = zeroshot.published_data(name, str(tmp_path))
    assert data.names == list(CLASSES) and data.attributes.shape == (4, 3)
    assert data.attributes[3].tolist() == [0, 0, 1] and data.attributes[0, 2] == 0
    assert data.attributes[0].tolist() == pytest.approx([math.sqrt(0.5), math.sqrt(0.5), 0])
    # The last two images, 47 and 48, are of the third and fourth class and in no split.
    assert len(data.images) == 46
    for i, (k, part) in enumerate(zip(data.classes, data.parts)):
        assert data.images[i] == f"{tmp_path / PHOTOS[name]}/{CLASSES[i % 4]}/{i}_a.jpg"
        assert k == i % 4
        wanted = zeroshot.UNSEEN if k == 1 else zeroshot.TRAIN if i < 32 else zeroshot.SEEN
        assert part == wanted


START = "downstream.zeroshot", "--weights", "random", "--arch", "resnet18"
START += "--image-size", 32, "--workers", 0
REFUSALS = {
    "att": ({"att": None}, "att_splits.mat: 'att' is missing"),
    "labels": ({"labels": np.zeros((48, 1))}, "labels holds 0 to 0, not 1 to 4"),
    "number": ({"labels": np.ones((47, 1))}, "res101.mat: 48 image_files, but 47 labels"),
    "zero": ({"trainval_loc": np.array([[0], [1]])}, "trainval_loc holds 0 to 1, not 1 to 48"),
    "beyond": ({"test_seen_loc": np.array([[49]])}, "test_seen_loc holds 49 to 49, not 1 to 48"),
    "classes": ({"att": np.ones((3, 5))}, "att must have 4 columns"),
    "finite": ({"att": np.full((3, 4), np.nan)}, "of finite numbers"),
    "twice": ({"test_seen_loc": np.array([[1], [3]])}, "an image is in two splits"),
    "trained": ({"test_unseen_loc": np.array([[48]])}, "unseen classes must have no training"),
    "empty": ({"test_unseen_loc": np.zeros((0, 1))}, "unseen classes must have no training"),
    "strings": ({"image_files": np.ones((48, 1))}, "res101.mat: "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_damaged_variables(case, tmp_path):
    changed, message = REFUSALS[case]
    publish(tmp_path, "cub", **changed)
    flags = "--data", "cub", "--root", tmp_path, "--output", tmp_path / "out"
    assert message in refusal([*START, *flags])


def test_missing_and_damaged_files(tmp_path):
    """Each by its name, with what was expected."""
    flags = *START, "--data", "awa2", "--root", tmp_path, "--output", tmp_path / "out"
    assert "xlsa17/data/AWA2/res101.mat not found" in refusal(flags)
    folder = publish(tmp_path, "awa2")
    photo = tmp_path / PHOTOS["awa2"] / "ox" / "3_a.jpg"
    photo.rename(tmp_path / "3.jpg")
    message = refusal(flags)
    assert "1 of 48 images are missing" in message and "unpack the photos" in message
    (tmp_path / "3.jpg").rename(photo)
    whole = (folder / "att_splits.mat").read_bytes()
    for content in whole[: len(whole) // 2], b"not MATLAB" * 20, b"":
        (folder / "att_splits.mat").write_bytes(content)
        message = refusal(flags)
        assert "att_splits.mat" in message and "xlsa17.zip unpacked" in message
    (folder / "att_splits.mat").unlink()
    assert "att_splits.mat not found" in refusal(flags)


def test_flags_that_do_not_go(tmp_path):
    out = "--output", tmp_path
    assert "--image-size 48" in refusal([*START, "--arch", "vgg16", *out])
    assert "--train-split" in refusal([*START, "--train-split", "all", *out])


# ------------------------------------------------------------------------------------ the script


def test_script(tmp_path):
    """The command on a tiny CUB: a table, one line at the end, result.json and a picture

    Two processes find the same as one; a photo that cannot be decoded is left out.
    """
    publish(tmp_path, "cub")
    (tmp_path / PHOTOS["cub"] / CLASSES[3] / "47_a.jpg").write_bytes(b"in no split, never read")
    (tmp_path / PHOTOS["cub"] / CLASSES[0] / "0_a.jpg").write_bytes(b"no photo")
    torch.save(common.build_backbone("resnet18").state_dict(), tmp_path / "backbone.pth")
    command = *START, "--data", "cub", "--root", tmp_path, "--runs", 2, "--epochs", 4
    command += "--weights", tmp_path / "backbone.pth", "--output"
    lines = run_here([*command, tmp_path / "one"]).splitlines()
    found = result(tmp_path / "one")
    top1 = found["trained"]["mean"]["top-1"]
    assert lines[-1].startswith(f"zero-shot on cub: top-1 {top1:.1f} trained, ")
    assert lines[-1].endswith("25.0 by guessing among 4 classes")
    assert sum("cannot decode" in line and "0_a.jpg" in line for line in lines) == 3
    for name in "trained", "random":
        assert len(found[name]["runs"]) == 2
        runs = [run["top-1"] for run in found[name]["runs"]]
        assert found[name]["mean"]["top-1"] == pytest.approx(np.mean(runs))
        assert set(found[name]["std"]) == {"top-1", "seen", "unseen", "harmonic mean"}
    assert (tmp_path / "one" / "unseen.png").stat().st_size > 1000
    in_two_processes(run_here, [*command, tmp_path / "two"])
    assert result(tmp_path / "two")["random"]["runs"] == found["random"]["runs"]


def test_shapes_at_tiny_size(tmp_path, monkeypatch):
    """No flags but those that make it small; five runs as in the paper"""
    monkeypatch.setattr(zeroshot, "SCENES", {"train": 200, "val": 100})
    output = run_here([*START, "--epochs", 2, "--output", tmp_path])
    assert "1.6 by guessing among 64 classes" in output.splitlines()[-1]
    assert len(result(tmp_path)["random"]["runs"]) == 5


def test_vgg_has_three_scores(tmp_path):
    """One for each of the last three convolutions [Tab. 6]; the last line has that of C-13."""
    publish(tmp_path, "cub")
    small = "--image-size", 48, "--runs", 1, "--epochs", 1, "--output", tmp_path / "out"
    flags = "--arch", "vgg16", "--data", "cub", "--root", tmp_path, *small
    assert "zero-shot on cub: C-13 top-1 " in run_here([*START, *flags]).splitlines()[-1]
    found = result(tmp_path / "out")
    [scores] = found["random"]["runs"]
    assert "trained" not in found  # --weights random
    assert [name for name in scores if "top-1" in name] == [f"C-{n} top-1" for n in (11, 12, 13)]
    assert len(scores) == 12
