"""downstream/zeroshot.py: Eqs. 9 to 12, the scores, the published layouts, and the real script."""

import argparse
import math
from statistics import harmonic_mean

import numpy as np
import pytest
import scipy.io
import torch
from conftest import CPU, result, run_here
from sklearn.metrics import accuracy_score, recall_score

import common
from downstream import zeroshot
from extras import layers, shapes


def test_equations(monkeypatch):
    """Every loss that is minimised is Eq. 11 over the seen classes, every prediction is Eq. 10:
    20 classes, each with two of 9 attributes, 2 of them unseen; features of 20 numbers
    """
    rng = np.random.default_rng(0)
    pairs = np.array([[*np.eye(4)[k // 5], *np.eye(5)[k % 5]] for k in range(20)])
    classes = np.repeat(np.arange(20), 15)
    parts = np.tile([zeroshot.TRAIN] * 10 + [zeroshot.SEEN] * 5, 20)
    parts[np.isin(classes, (2, 9))] = zeroshot.UNSEEN
    x = pairs[classes] @ rng.normal(size=(9, 20)) + 0.02 * rng.normal(size=(300, 20))
    x, attributes = torch.from_numpy(x).float(), rng.uniform(0.5, 2, (20, 1)) * pairs
    of_photos = {"images": np.arange(300), "labels": classes, "parts": parts}
    data = zeroshot.ZeroShotData(**of_photos, names=list(range(20)), attributes=attributes)
    attributes = attributes / np.linalg.norm(attributes, axis=1, keepdims=True)  # cosines count
    of_seen, calls = np.delete(attributes, (2, 9), 0), []
    train_linear = layers.train_linear

    def literal_scores(layer, xs, attributes):  # Eq. 9 one by one: f(x, a) = a'(Σx + b)
        sigma, b = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
        return np.array([[a @ (sigma @ x + b) for a in attributes] for x in xs.double().numpy()])

    def trained(x, labels, rows, trials, *given, width, loss_fn):
        layers = train_linear(x, labels, rows, trials, *given, width=width, loss_fn=loss_fn)
        with torch.no_grad():
            minimised = float(loss_fn(layers[0](x[:9]), torch.arange(9)))
        scores = literal_scores(layers[0], x[:9], of_seen)
        likelihood = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)  # Eq. 12
        expected = -np.log(likelihood.diagonal()).mean()  # Eq. 11
        assert width == 9 and minimised == pytest.approx(expected, rel=1e-4)
        calls.append((len(rows), [lr for lr, _ in trials], layers[0], labels[rows]))
        return layers

    monkeypatch.setattr(layers, "train_linear", trained)
    args = argparse.Namespace(epochs=30, batch_size=32, seed=0)
    predicted = zeroshot.predict_classes(x, data, args, CPU)
    (rest, rates, *_), (count, chosen, layer, labels) = calls
    assert (rest, count) == (144, 180), "a fifth of 180 training photos is held out, then all"
    assert len(rates) > 3 and len(chosen) == 1 and chosen[0] in rates
    assert np.bincount(labels).tolist() == 18 * [10]
    expected = literal_scores(layer, x[::10], attributes).argmax(1)
    assert predicted[::10].tolist() == expected.tolist()
    scores = zeroshot.accuracies(predicted, data)
    assert scores["seen"] > 85 and scores["unseen"] > 85


def test_accuracies():
    """The mean over classes is not the mean over photos; training photos do not count."""
    rng = np.random.default_rng(0)
    classes = np.sort(rng.integers(0, 6, 90) * rng.integers(0, 2, 90))  # class 0 is frequent
    parts = np.where(classes > 3, zeroshot.UNSEEN, rng.integers(0, 2, 90))
    predicted = np.where(rng.random(90) < 0.3 + 0.1 * classes, classes, 0)
    of_photos = {"images": np.arange(90), "labels": classes, "parts": parts}
    data = zeroshot.ZeroShotData(**of_photos, names=list("abcdef"), attributes=np.eye(6))
    scores = zeroshot.accuracies(predicted, data)

    tested = parts != zeroshot.TRAIN
    expected = {"top-1": 100 * accuracy_score(classes[tested], predicted[tested])}
    for name, part in ("seen", zeroshot.SEEN), ("unseen", zeroshot.UNSEEN):
        of, given = classes[parts == part], predicted[parts == part]
        expected[name] = 100 * recall_score(of, given, labels=np.unique(of), average="macro")
    expected["harmonic mean"] = harmonic_mean([expected["seen"], expected["unseen"]])
    assert scores == pytest.approx(expected)
    assert len({round(score, 6) for score in scores.values()}) == 4, "nothing tells them apart"
    assert set(zeroshot.accuracies(np.full(90, -1), data).values()) == {0}


PHOTOS = {"cub": "CUB_200_2011/images", "awa2": "Animals_with_Attributes2/JPEGImages"}
CLASSES = "001.Red_cap", "killer+whale", "003.Moon", "ox"  # trained, unseen, trained, trained


def publish(root, name):
    """12 photos of each of four classes in the published layout, as MATLAB would save them"""
    folder, photos = root / "xlsa17" / "data" / name.upper(), root / PHOTOS[name]
    folder.mkdir(parents=True)
    files, labels = [], []
    for n in range(48):  # the classes in turns
        k = n % 4
        (photos / CLASSES[k]).mkdir(parents=True, exist_ok=True)
        shapes.draw(n, 48).save(photos / CLASSES[k] / f"{n}_a.jpg")
        files.append([f"/home/someone/my images//{PHOTOS[name]}/{CLASSES[k]}/{n}_a.jpg"])
        labels.append([k + 1])
    of_images = {"image_files": np.array(files, object), "labels": np.array(labels, np.uint8)}
    scipy.io.savemat(folder / "res101.mat", {**of_images, "features": np.zeros((2048, 3))})
    one = [n + 1 for n in range(48)]
    att = np.array([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 1.0]])
    of_train, of_test = ([i for i in part if i % 4 != 2] for part in (one[:32], one[32:46]))
    content = {
        "allclasses_names": np.array([CLASSES], object).T,  # a cell array
        "att": att / np.linalg.norm(att, axis=0),
        "original_att": att,
        "trainval_loc": np.array([of_train], np.uint16).T,
        "test_seen_loc": np.array([of_test], float).T,
        "test_unseen_loc": np.array([one[1::4]], float).T,
    }
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
    # The last two photos, 47 and 48, are of the third and fourth class and in no split.
    assert list(data.labels) == [i % 4 for i in range(46)]
    photos = tmp_path / PHOTOS[name]
    assert list(data.images) == [f"{photos}/{CLASSES[i % 4]}/{i}_a.jpg" for i in range(46)]
    parts = [zeroshot.TRAIN] * 32 + [zeroshot.SEEN] * 14
    parts[1::4] = [zeroshot.UNSEEN] * 12
    assert list(data.parts) == parts


def test_script(tmp_path):
    """The command on a tiny CUB; a photo that cannot be decoded is left out."""
    publish(tmp_path, "cub")
    (tmp_path / PHOTOS["cub"] / CLASSES[3] / "47_a.jpg").write_bytes(b"in no split, never read")
    (tmp_path / PHOTOS["cub"] / CLASSES[0] / "0_a.jpg").write_bytes(b"no photo")
    torch.save(common.build_backbone("resnet18").state_dict(), tmp_path / "backbone.pth")
    flags = "--data", "cub", "--root", tmp_path, "--image-size", 32, "--workers", 0, "--runs", 2
    flags += "--epochs", 4, "--weights", tmp_path / "backbone.pth", "--output", tmp_path / "out"
    lines = run_here(["downstream.zeroshot", *flags]).splitlines()
    content = result(tmp_path / "out")
    start = f"zero-shot on cub: top-1 {content['trained']['top-1']:.1f} trained, "
    assert lines[-1].startswith(start)
    assert lines[-1].endswith("25.0 by guessing among 4 classes")
    assert sum("cannot decode" in line and "0_a.jpg" in line for line in lines) == 1
    for name in "trained", "random":
        runs = [run["top-1"] for run in content["runs"][name]]
        assert len(runs) == 2 and content[name]["top-1"] == pytest.approx(np.mean(runs))
        assert set(content["std"][name]) == {"top-1", "seen", "unseen", "harmonic mean"}
