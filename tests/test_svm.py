"""The SVMs of svm-virtex and extras/svm.py: costs, scores, the minimum of the loss."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CPU
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_score
from sklearn.preprocessing import normalize
from sklearn.svm import LinearSVC

import eval_linear
from extras import svm


def literal_svms(train_x, train_y, test_x, test_y, k):
    """Class k by scikit-learn, as VirTex App. A.1 has it -> its best cost, {cost: score}"""
    positive = (train_y[:, k] == 1).astype(int)  # difficult images are negatives in training
    easy = test_y[:, k] != -1  # and do not count in testing
    train_x, test_x = normalize(train_x), normalize(test_x[easy])
    validated, scores = {1.0: 0}, {}
    for cost in (0.01, 0.1, 1.0, 10.0):
        svc = LinearSVC(C=cost, class_weight={1: 2, 0: 1}, max_iter=2000, random_state=0)
        if positive.sum() >= 3:
            folds = cross_val_score(svc, train_x, positive, scoring="average_precision", cv=3)
            validated[cost] = folds.mean()
        decisions = svc.fit(train_x, positive).decision_function(test_x)
        scores[cost] = 100 * average_precision_score(test_y[easy, k], decisions)
    return max(sorted(validated), key=validated.get), scores


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_svms_are_those_of_scikit_learn(monkeypatch):
    """The same cost and average precision; a tenth of the labels is difficult."""
    rng = np.random.default_rng(0)
    x, directions = rng.normal(size=(140, 12)), rng.normal(size=(12, 6))
    y = (x @ directions + 4 * rng.normal(size=(140, 6)) > 2).astype(np.int8)
    y[rng.random(y.shape) < 0.1] = -1
    train_y, test_y = y[:90], y[90:]
    train_y[:, 3] = np.arange(90) < 2  # d: two positives, too few to choose: the cost is 1
    test_y[test_y[:, 4] == 1, 4] = 0  # e: nothing to find in testing
    train_y[train_y[:, 5] == 1, 5] = -1  # f: nothing to learn from
    train, test = [eval_linear.Outputs(*map(torch.from_numpy, pair))
                   for pair in ((x[:90], train_y), (x[90:], test_y))]
    protocol = eval_linear.PROTOCOLS["svm-virtex"]
    run = eval_linear.Run(None, protocol, "random", None, list("abcdef"), CPU, None, None)
    results, chosen = eval_linear.measure(eval_linear.svm_virtex(train, test, run), run), []
    assert list(results) == ["mAP", *"abcd", "chance"]
    assert results["mAP"] == pytest.approx(np.mean([results[name] for name in "abcd"]))
    for k, name in enumerate("abcd"):
        cost, scores = literal_svms(x[:90], train_y, x[90:], test_y, k)
        chosen.append(cost)
        assert results[name] == pytest.approx(scores.pop(cost), abs=1e-9)
        assert any(abs(other - results[name]) > 1e-3 for other in scores.values()), "no choice"
    assert len(set(chosen[:3])) > 1 and chosen[3] == 1
    monkeypatch.setattr(svm, "GROUP", 1)
    monkeypatch.setattr(svm, "BLOCK", 7)
    again = eval_linear.measure(eval_linear.svm_virtex(train, test, run), run)
    assert again == pytest.approx(results, abs=1e-9)


def test_svm_icmlm_interpolates(monkeypatch):
    """ICMLM App. F.2: at each recall the best precision at this or a higher one; here C is 1."""
    rng = np.random.default_rng(2)
    x, direction = rng.normal(size=(120, 12)), rng.normal(size=12)
    y = (x @ direction + 6 * rng.normal(size=120) > 2).astype(np.int8)[:, None]
    monkeypatch.setattr(svm, "choose_costs", lambda x, y, costs: x.new_ones(y.shape[1]))
    unit = torch.from_numpy(normalize(x))
    train = eval_linear.Outputs(unit[:60], torch.from_numpy(y[:60]))
    test = eval_linear.Outputs(unit[60:], torch.from_numpy(y[60:]))
    classifier = LinearSVC(dual=False, class_weight={1: 2}, tol=1e-8).fit(unit[:60], y[:60, 0])
    order = np.argsort(-classifier.decision_function(unit[60:]))
    right = y[60:, 0][order]
    precision = right.cumsum() / np.arange(1, 61)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    expected = 100 * (best * right).sum() / right.sum()
    scores = {}
    for name in "svm-icmlm", "svm-virtex":
        protocol, args = eval_linear.PROTOCOLS[name], SimpleNamespace(seed=0)
        run = eval_linear.Run(args, protocol, "random", None, ["a"], CPU, None, None)
        scores[name] = eval_linear.measure(protocol.decide(train, test, run), run)["a"]
    assert scores["svm-icmlm"] == pytest.approx(expected, abs=1e-6)
    assert scores["svm-virtex"] < expected - 0.5


def test_of_equal_costs_the_lowest_is_chosen(monkeypatch):
    """The same three scores in another order have the same mean, but for the last bit."""
    scores = iter([0.3, 0.2, 0.1, 0.1, 0.2, 0.3])
    monkeypatch.setattr("sklearn.metrics.average_precision_score", lambda *_: next(scores))
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positive = np.arange(9)[:, None] < 4
    assert svm.choose_costs(x, positive, [0.1, 1.0]).tolist() == [0.1]


@pytest.mark.parametrize("width", (12, 150))  # fewer features than images, and more
@pytest.mark.parametrize("cost", (1e-5, 0.1, 10.0, 1e5))
@pytest.mark.parametrize("start", (None, 100.0))
def test_solve_svms_finds_the_minimum(start, cost, width):
    """The loss is strictly convex: its gradient is zero only at the minimum, from any start."""
    rng = np.random.default_rng(width)
    features, positive = rng.normal(size=(60, width)), rng.random((60, 2)) < 0.3
    costs = torch.full((60, 2), cost, dtype=torch.float64)
    costs[:7, 1] = 0
    [x] = svm.blocks(features, CPU)
    axes = svm.principal_axes(features)
    start = start and torch.full((axes.shape[1], 2), start, dtype=torch.float64)
    solved = axes @ svm.solve_svms(x @ axes, positive, costs, start)

    def gradient_norms(w):
        w.requires_grad_()
        sign = torch.from_numpy(np.where(positive, 1, -1))
        hinge = (1 - sign * (x @ w)).clamp(min=0)
        weights = costs * torch.from_numpy(np.where(positive, 2, 1))
        loss = w.square().sum() / 2 + (weights * hinge**2).sum()
        return torch.autograd.grad(loss, w)[0].norm(dim=0)

    assert (gradient_norms(solved) <= 1.1e-5 * gradient_norms(torch.zeros_like(solved))).all()
