"""svm.py: the same costs and scores as scikit-learn, the minimum of the loss, average precision."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ALONE, CPU
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC

import common
import eval_linear
import svm

COSTS = 0.01, 0.1, 1.0, 10.0  # [VirTex App. A.1]
quiet = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def features():
    """Features in which six classes are more or less visible, a tenth of the entries difficult.

    Class d has two positives, e none in testing, f none in training.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(140, 12)).astype(np.float32)
    directions = rng.normal(size=(12, 6))
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
        svc = LinearSVC(C=cost, class_weight={1: 2, 0: 1}, max_iter=2000, random_state=0)
        if positive.sum() >= 3:
            folds = cross_val_score(svc, train_x, positive, cv=3, scoring="average_precision")
            validated[cost] = folds.mean()
        decisions = svc.fit(train_x, positive).decision_function(test_x)
        scores[cost] = 100 * average_precision_score(test_y[easy, k], decisions)
    return max(sorted(validated), key=validated.get), scores


@quiet
def test_svms_are_those_of_scikit_learn(features, monkeypatch):
    """The same cost and average precision. With two positives, too few to choose, the cost is 1.

    What does not fit in memory together is read and solved in parts, with the same result.
    """
    results, chosen = svm.svm_probe(*features, "abcdef"), []
    assert list(results) == list("abcd")  # of e and f there is nothing to test or to learn
    for k, name in enumerate("abcd"):
        cost, scores = literal_svms(*features, k)
        chosen.append(cost)
        assert results[name] == pytest.approx(scores.pop(cost), abs=1e-9)
        assert any(abs(other - results[name]) > 1e-3 for other in scores.values()), "no choice"
    assert len(set(chosen[:3])) > 1 and chosen[3] == 1
    monkeypatch.setattr(svm, "GROUP", 1)
    monkeypatch.setattr(svm, "BLOCK", 7)
    assert svm.svm_probe(*features, "abcdef") == pytest.approx(results, abs=1e-9)


@quiet
@pytest.mark.parametrize("source, size, count", (("shapes", 32, 200), ("folder", 48, 300)))
def test_svms_on_features_of_a_backbone(source, size, count, request, tmp_path):
    """Of scenes and of real flowers: each class agrees with scikit-learn to 0.05 points."""
    root = request.getfixturevalue("real_data") / "flowers" if source == "folder" else None
    args = SimpleNamespace(image_size=size, amp="off", workers=0, output=tmp_path)
    torch.manual_seed(0)
    backbone, given, features = common.build_backbone("resnet18"), [], []
    for seed, split in enumerate(("train", "val")):
        data = eval_linear.label_data(source, root, split)
        columns = svm.label_columns(data.labels, np.arange(len(data.names)))
        counts = columns.sum(0).tolist()
        assert source == "shapes" or counts == 5 * [300 if split == "train" else 100]
        order = np.random.default_rng(seed).permutation(len(data.images))[:count]
        data = data.select(order)
        x, readable = eval_linear.extract_features(backbone, data.images, args, ALONE)
        given += x, data.labels[readable]
        features += x, columns[order][readable]
    results = svm.svm_probe(*given, data.names)
    assert len(results) > 4
    for k, name in enumerate(data.names):
        cost, scores = literal_svms(*features, k)
        assert results[name] == pytest.approx(scores[cost], abs=0.05)


@pytest.mark.parametrize("width", (12, 150))  # fewer features than images, and more
@pytest.mark.parametrize("cost", (1e-5, 0.1, 10.0, 1e5))
@pytest.mark.parametrize("start", (None, 100.0))
def test_solve_svms_finds_the_minimum(start, cost, width):
    """The loss is strictly convex: its gradient, written in loops, is zero only at the minimum.

    From any start; an example of cost zero is as good as absent.
    """
    rng = np.random.default_rng(width)
    features, positive = rng.normal(size=(60, width)), rng.random((60, 2)) < 0.3
    costs = np.full((60, 2), cost)
    costs[:7, 1] = 0
    [x] = svm.blocks(features, CPU)
    axes = svm.principal_axes(features)
    start = start and torch.full((axes.shape[1], 2), start, dtype=torch.float64)
    solved = axes @ svm.solve_svms(x @ axes, positive, torch.from_numpy(costs), start)
    x = x.numpy()
    for k, w in enumerate(solved.T.numpy()):
        gradient, at_zero = w.copy(), np.zeros(width + 1)
        for i in range(60):
            sign, c = (1, 2 * costs[i, k]) if positive[i, k] else (-1, costs[i, k])
            gradient -= 2 * c * max(0, 1 - sign * w @ x[i]) * sign * x[i]
            at_zero -= 2 * c * sign * x[i]
        assert np.linalg.norm(gradient) <= 1.1e-5 * np.linalg.norm(at_zero)


def test_average_precisions():
    """Of the images where a class is not difficult, and of classes with a positive, in percent."""
    decisions = np.array([[3.0, 1, 7], [2, 2, 8], [1, 3, 9]])
    labels = np.array([[0, 0, 0], [1, -1, -1], [-1, 1, 0]], np.int8)
    assert svm.label_columns(np.array([0, 1]), [1, 0]).tolist() == [[0, 1], [1, 0]]
    scores = svm.average_precisions(decisions, labels, "abc")
    assert scores == {"a": 50, "b": 100} and svm.mean_of(scores) == 75


def test_interpolated_average_precision():
    """The best precision at each recall or a higher one, as Goyal et al. (2019) score VOC07"""
    rng = np.random.default_rng(0)
    truth, decision = (rng.random(30) < 0.3).astype(np.int8), rng.normal(size=30).round(1)
    precisions, recalls = [], []
    for threshold in sorted(set(decision), reverse=True):
        above = decision >= threshold
        precisions.append(truth[above].mean())
        recalls.append(truth[above].sum() / truth.sum())
    expected, before = 0, 0
    for n, recall in enumerate(recalls):
        expected += (recall - before) * max(precisions[n:])
        before = recall
    [score] = svm.average_precisions(decision[:, None], truth[:, None], "a", True).values()
    [plain] = svm.average_precisions(decision[:, None], truth[:, None], "a").values()
    assert score == pytest.approx(100 * expected) and score > plain + 0.1
