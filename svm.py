"""Linear SVMs of all classes, costs and folds at once, on a CPU or a GPU: numpy and torch

    scores = svm_probe(train_x, train_y, test_x, test_y, names)  # {class: AP in percent}

They minimise w'w / 2 + sum_i c_i max(0, 1 - s_i w'x_i)^2 as LIBLINEAR does (scikit-learn's
LinearSVC, with the same scores), by Newton's method: (I + x' diag(curvature) x) step = -gradient.
The SVMs are columns of one matrix and share each product with the features. Labels are class
indices (N,), or (N, classes): 1 yes, 0 no, -1 difficult (VOC only).
"""

import numpy as np
import torch
from tqdm import tqdm

COSTS = 0.01, 0.1, 1.0, 10.0  # C of the SVMs [VirTex App. A.1]
GROUP = 100  # classes that are solved together: at most 2.4 KB per image and matrix
BLOCK = 1024  # rows of features that are copied to float64 at a time
TINY = 1e-300  # in place of 0 in a quotient 0 / 0 of a column that is solved


def svm_probe(
    train_x,
    train_y,
    test_x,
    test_y,
    names,
    costs=COSTS,
    device="cpu",
    interpolated=False,
):
    """One SVM per class [VirTex App. A.1] -> {class: average precision in percent}

    Squared hinge loss, positives weighted 2, C by 3-fold cross-validation.  train_x, test_x: (N, D)
    features, l2-normalised here [official code].  train_y, test_y: labels; "difficult" are
    negatives in training, left out in testing [official code].  costs: rising.
    A class without positives or negatives in training, or positives in testing, has no score.
    """
    classes = np.flatnonzero(scorable(train_y, test_y, len(names)))
    if not len(classes):
        return {}
    axes = principal_axes(train_x, device)  # where the SVMs are quicker to solve
    x = axes.new_empty(len(train_x), axes.shape[1])
    for x_rows, rows in zip(x.split(BLOCK), blocks(train_x, device)):
        torch.mm(rows, axes, out=x_rows)
    scores = {}
    for group in np.array_split(classes, 1 + len(classes) // GROUP):
        positive = label_columns(train_y, group) == 1
        chosen = choose_costs(x, positive, costs)
        w = axes @ solve_svms(x, positive, chosen)
        decisions = torch.cat([rows @ w for rows in blocks(test_x, device)])
        scores |= average_precisions(
            decisions.cpu().numpy(),
            label_columns(test_y, group),
            [names[k] for k in group],
            interpolated,
        )
    return scores


def label_columns(labels, classes):
    """(N, len(classes)): 1, 0 or -1 for each of these classes"""
    if labels.ndim == 1:
        return labels[:, None] == classes
    return labels[:, classes]


def scorable(train_y, test_y, num_classes):
    """-> (num_classes,) bool: with positives and negatives to learn from, and positives to find"""
    classes = np.arange(num_classes)
    train = label_columns(train_y, classes) == 1
    test = label_columns(test_y, classes) == 1
    return train.any(0) & ~train.all(0) & test.any(0)


def average_precisions(decisions, labels, names, interpolated=False):
    """(N, classes) both, labels of -1 not counted -> {class: average precision in percent}

    The area under the whole curve, not VOC07's mean over eleven recalls; of classes with positives.
    interpolated: with the best precision at this recall or a higher one [Goyal et al. 2019].
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    scores = {}
    for name, truth, decision in zip(names, labels.T, decisions.T):
        counted = truth >= 0
        truth = truth[counted]
        decision = decision[counted]
        if not truth.any():
            continue
        area = average_precision_score(truth, decision)
        if interpolated:
            precision, recall, _ = precision_recall_curve(truth, decision)  # recall falls
            highest = np.maximum.accumulate(precision)
            area = -np.sum(np.diff(recall) * highest[:-1])
        scores[name] = 100 * float(area)
    return scores


def mean_of(scores):
    return float(np.mean(list(scores.values()))) if scores else np.nan


def l2_normalize(x):
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.maximum(norm, 1e-12)


def blocks(x, device):
    """BLOCK rows of x (N, D) at a time, in float64: unit length, and a constant feature

    Its weight is the bias: regularised as in LIBLINEAR.
    """
    for start in range(0, len(x), BLOCK):
        rows = x[start : start + BLOCK].astype(np.float64)
        rows = torch.from_numpy(l2_normalize(rows)).to(device)
        yield torch.nn.functional.pad(rows, (0, 1), value=1)


def principal_axes(x, device="cpu"):
    """z, all rows of blocks(x) -> eigenvectors of z'z, (D + 1, at most min(N, D + 1))"""
    if len(x) > x.shape[1]:
        products = sum(rows.T @ rows for rows in blocks(x, device))
        return torch.linalg.eigh(products)[1]
    z = torch.cat(list(blocks(x, device)))
    values, vectors = torch.linalg.eigh(z @ z.T)  # the smaller matrix has the same eigenvalues
    kept = values > 1e-12 * values[-1]
    lengths = values[kept].sqrt()
    return z.T @ vectors[:, kept] / lengths


def choose_costs(x, positive, costs):
    """The cost with the best average precision in cross-validation -> (classes,) float64

    x: (N, D) in its principal axes.  positive: (N, classes) bool; the cost is 1 for a class with
    fewer than three positives or negatives, one for each fold.
    """
    chosen = np.ones(positive.shape[1])
    rarer = np.minimum(positive.sum(0), (~positive).sum(0))
    enough = rarer >= 3
    if enough.any():
        scores = cross_validate(x, positive[:, enough], costs)
        chosen[enough] = np.array(costs)[scores.argmax(0)]
    return torch.from_numpy(chosen).to(x.device)


def cross_validate(x, positive, costs):
    """Average precision in percent, the mean over three folds -> (costs, classes)"""
    from sklearn.model_selection import StratifiedKFold

    folds = []  # of each class three: labels of the images that are held out, -1 for the others
    for truth in positive.T:
        for _, held_out in StratifiedKFold(3).split(truth, truth):
            labels = np.full(len(truth), -1)
            labels[held_out] = truth[held_out]
            folds.append(labels)
    labels = np.stack(folds, 1)
    weights = (labels < 0).astype(np.float64)  # zero for held-out samples
    weights = torch.from_numpy(weights).to(x.device)
    positive = positive.repeat(3, axis=1)
    w = None
    scores = []
    for cost in tqdm(costs, desc="SVMs", leave=False, dynamic_ncols=True):
        w = solve_svms(x, positive, cost * weights, start=w)  # near the solution of the cost before
        decisions = (x @ w).cpu().numpy()
        areas = average_precisions(decisions, labels, range(len(folds)))
        scores.append(list(areas.values()))
    return np.reshape(scores, (len(costs), -1, 3)).mean(2)


def solve_svms(x, positive, costs, start=None):
    """Each column of w (D, M) minimises w'w / 2 + sum_i c_i max(0, 1 - s_i w'x_i)^2

    s_i = 1 or -1, c_i doubled for positives.  x: (N, D) in its principal axes.  positive: (N, M)
    bool, numpy.  costs: (M,) or (N, M), 0 leaves an example out.  start: (D, M).
    Newton's method with conjugate gradients [Lin, Weng, Keerthi 2008], all columns at once.
    """
    positive = torch.from_numpy(positive).to(x.device)
    sign = 2.0 * positive - 1
    costs = costs * (1.0 + positive)
    w = costs.new_zeros(x.shape[1], sign.shape[1]) if start is None else start.clone()
    gradient_at_0 = 2 * (x.T @ (costs * sign))
    goal = 1e-5 * gradient_at_0.norm(dim=0)
    unsolved = torch.arange(len(goal), device=x.device)  # columns
    for _ in range(1000):
        slack = (1 - sign * (x @ w[:, unsolved])).clamp(min=0)
        errors = costs * sign * slack
        gradient = w[:, unsolved] - 2 * (x.T @ errors)
        far = gradient.norm(dim=0) > goal[unsolved]
        if not far.any():
            break
        unsolved = unsolved[far]
        sign = sign[:, far]
        costs = costs[:, far]
        curvature = 2 * costs * (slack[:, far] > 0)  # the Hessian is I + x' diag(curvature) x
        step = conjugate_gradients(x, curvature, -gradient[:, far])
        w[:, unsolved] = line_search(x, sign, costs, w[:, unsolved], step)
    return w


def conjugate_gradients(x, curvature, target):
    """Per column: solve (I + x' diag(curvature) x) step = target up to a tenth of its norm

    In the principal axes the matrix is nearly diagonal: its diagonal is the preconditioner.
    """
    squares = x.norm(dim=0)[:, None].square()
    diagonal = 1 + squares / len(x) * curvature.sum(0)
    goal = 0.1 * target.norm(dim=0)
    step = torch.zeros_like(target)
    residual = target.clone()
    direction = residual / diagonal
    inner = (residual * direction).sum(0)
    for _ in range(200):
        product = direction + x.T @ (curvature * (x @ direction))
        length = inner / (direction * product).sum(0).clamp(min=TINY)
        step += length * direction
        residual -= length * product
        if (residual.norm(dim=0) <= goal).all():
            break
        scaled = residual / diagonal
        previous = inner.clamp(min=TINY)
        inner = (residual * scaled).sum(0)
        direction = scaled + inner / previous * direction
    return step


def line_search(x, sign, costs, w, step):
    """w + step, where the step of a column is halved until its loss does not rise"""

    def loss(w):
        slack = (1 - sign * (x @ w)).clamp(min=0)
        penalty = (costs * slack.square()).sum(0)
        return w.square().sum(0) / 2 + penalty

    highest = loss(w) * (1 + 1e-12)  # rounding errors are no rise
    for _ in range(30):
        too_long = loss(w + step) > highest
        if not too_long.any():
            break
        step = torch.where(too_long, step / 2, step)
    return w + step
