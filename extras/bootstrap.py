"""How far would scores of eval_linear.py move on other test photos? A paired bootstrap says it.

A draw takes as many photos as there are, with replacement. It is stored as a count for each photo,
and all backbones get the same draws. So a difference of two backbones is free of what both owe to
the photos.
"""

from functools import partial

import numpy as np

DRAWS = 1000
PART = 50  # draws at a time: for 50,000 photos, their counts take 10 MB
WHAT_INTERVALS_SAY = ("In brackets: 95% intervals over test photos of this kind. Another training "
    "moves a score, too: on photos by about a point.")


def counts_of_draws(photos, seed):
    """Yield the counts of PART draws, int32 (photos, PART), until DRAWS are there."""
    rng = np.random.default_rng(seed)
    for _ in range(DRAWS // PART):
        draws = rng.integers(photos, size=(PART, photos))
        yield np.stack([np.bincount(draw, minlength=photos) for draw in draws], 1).astype(np.int32)


def scores_of_draws(decisions, labels, rows, photos, interpolated=False, seed=0):
    """The scores of one run on one backbone -> {metric: percent of each draw (DRAWS,)}

    decisions: {metric: (N, classes)}, NaN for a class that was not learned.  labels: (N,), or (N,
    classes) of 1, 0 and -1, which does not count.  rows: (N,) the photos' indices among the
    `photos` that are drawn from.  interpolated: see eval_linear.average_precision.  seed: the same
    for all that is compared
    """
    scores = {}
    for metric, x in decisions.items():
        if labels.ndim == 1:
            score = partial(top_1, (x.argmax(1) == labels).numpy())
        else:
            rankings = []
            for decision, truth in zip(x.T.numpy(), labels.T.numpy()):
                if (truth == 1).any() and not np.isnan(decision).any():
                    rankings.append(rank(decision, truth))
            score = partial(mean_average_precision, rankings, interpolated)
        parts = [score(counts[rows]) for counts in counts_of_draws(photos, seed)]
        scores[metric] = np.concatenate(parts)
    return scores


def top_1(right, counts):
    """right: (N,) is the class of each photo found?  counts: (N, draws) -> percent (draws,)"""
    return 100 * (right @ counts) / np.maximum(counts.sum(0), 1)


def mean_average_precision(rankings, interpolated, counts):
    """rankings: `rank` of each class.  counts: (N, draws) -> percent (draws,)

    A class that has no positive photo in a draw, or no negative one, is left out of it.
    """
    total, classes = 0, 0
    for ranking in rankings:
        precision, scored = average_precision(*ranking, interpolated, counts)
        total = total + precision * scored
        classes = classes + scored
    return total / np.maximum(classes, 1)


def rank(decision, truth):
    """One class, sorted once -> the photos that count, by falling decision; of each positive its
    place among them, and the last place that has the same decision: equals are found together
    """
    counted = np.flatnonzero(truth >= 0)
    order = counted[np.argsort(-decision[counted])]
    rising = -decision[order]
    places = np.flatnonzero(truth[order] == 1)
    ends = np.searchsorted(rising, rising[places], side="right") - 1
    return order, places, ends


def average_precision(order, places, ends, interpolated, counts):
    """One class, as `rank` gives it -> percent (draws,); has it both kinds of photos (draws,)?"""
    found = counts.take(order, axis=0)
    np.cumsum(found, axis=0, out=found)  # photos down to each place; in place it is twice as fast
    positives = counts[order[places]]
    right = positives.cumsum(0)
    last = np.searchsorted(places, ends, side="right") - 1  # the last positive that is as good
    precision = right[last] / np.maximum(found[ends], 1)
    if interpolated:  # the best at this or a higher recall
        precision = np.maximum.accumulate(precision[::-1])[::-1]
    scored = (0 < right[-1]) & (right[-1] < found[-1])
    return 100 * (positives * precision).sum(0) / np.maximum(right[-1], 1), scored


def interval(value, draws):
    """-> [low, high], 95%

    Photos that are drawn twice are found together, which raises each average precision. So the
    draws lie around their mean, and are moved to lie around the value that was measured.
    """
    return (value + np.quantile(draws - draws.mean(), [0.025, 0.975])).tolist()


def compare(results, draws, references):
    """Add the "interval" and the "differences" of each row to `results` -> [sentence]

    results: {backbone: {"mean": {metric: percent}}}.  draws: {backbone: [scores_of_draws of a
    run]}.  references: backbones that each row is compared with
    """
    sentences = []
    drawn = {}  # the mean over the runs
    for name, runs in draws.items():
        drawn[name] = {metric: np.mean([run[metric] for run in runs], 0) for metric in runs[0]}
    for name, row in results.items():
        row["interval"] = {}
        row["differences"] = {other: {} for other in references if other != name}
        for metric in drawn[name]:
            row["interval"][metric] = interval(row["mean"][metric], drawn[name][metric])
            for other, differences in row["differences"].items():
                points = row["mean"][metric] - results[other]["mean"][metric]
                limits = interval(points, drawn[name][metric] - drawn[other][metric])
                differences[metric] = {"points": points, "interval": limits}
                if name != references[0]:
                    layer = "" if len(drawn[name]) == 1 else f"{metric}: "
                    sentences.append(layer + in_words(name, other, points, *limits))
    return [*sentences, WHAT_INTERVALS_SAY]


def in_words(name, other, points, low, high):
    if low <= 0 <= high:
        return (f"{name} cannot be told apart from {other}: the difference is {points:.1f} points "
                f"({low:.1f} to {high:.1f})")
    side = "above" if points > 0 else "below"
    near, far = sorted([abs(low), abs(high)])
    return f"{name} is {abs(points):.1f} points {side} {other} ({near:.1f} to {far:.1f})"
