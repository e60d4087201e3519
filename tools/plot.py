"""Draw the loss curves of runs from their metrics.jsonl, or the scores of backbones as bars

    python tools/plot.py runs/virtex                                  # all terms of one run
    python tools/plot.py runs/tp runs/tp-wide --output tp.png         # the terms that both have
    python tools/plot.py runs/eval_linear/flowers-svm-virtex/result.json    # bars in scores.png
    python tools/plot.py docs/scores.csv --output docs/growth.png     # the picture of results.md

Curves: a panel per term, a colour per run. The pale line shows the values, and the strong one a
running mean over a twentieth of the run. Scores on the validation split are dotted, in the panel of
their term. You can draw runs that are still in progress.

Bars: the first score of a result.json of eval_linear.py, with intervals if it compared several
backbones. The interval of a difference stands below the name. It decides: those of two scores may
overlap although one is better on nearly every draw of the same photos.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
from scipy.ndimage import uniform_filter1d

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import fail
from tools.tables import read_scores, to_tables

NO_TERMS = {"iteration", "lr", "text_lr", "images_per_s", "data_wait"}
VALIDATION = "validation_"
DOTTED = {"marker": "o", "linestyle": ":", "markersize": 4}
UNITS = {
    "forward": "nats per token", "backward": "nats per token", "mlm": "nats per masked word",
    "lr": "learning rate", "text_lr": "learning rate", "images_per_s": "photos per second",
    "data_wait": "share of the time",
}


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN",
        help="--output of a training run; or the result.json of eval_linear.py")
    add("--terms", nargs="+", metavar="TERM", help="draw only these, such as loss images_per_s")
    add("--output", help="picture to write, a .png, .pdf or .svg (default: curves.png in the "
        "last RUN; scores.png beside result.json)")
    return parser.parse_args(argv)


def main(args):
    os.environ.pop("MPLBACKEND", None)  # a Jupyter kernel's, which may not be installed here
    path = Path(args.runs[-1])
    if path.suffix == ".csv":
        default, draw = "growth.png", draw_growth
    elif path.suffix == ".json":
        default, draw = path.with_name("scores.png"), draw_scores
    else:
        default, draw = path / "curves.png", draw_curves
    figure, drawn = draw(args)
    figure.savefig(args.output or default, dpi=150)
    print(f"{drawn}: {args.output or default}")


# ---------------------------------------------------------------------------------------- curves


def read_run(path):
    """-> {term: (iterations, values)}"""
    file = Path(path, "metrics.jsonl")
    lines = file.read_text().splitlines() if file.exists() else []
    if not lines:
        fail(f"{file} is missing or empty: it gets a line every --log-every iterations")
    curves = {}
    for row in map(json.loads, lines):
        for term, value in row.items():
            x, y = curves.setdefault(term, ([], []))
            x.append(row["iteration"])
            y.append(value)
    return curves


def draw_curves(args):
    from matplotlib.figure import Figure  # only here: it takes a second, which --help saves

    runs = {path: read_run(path) for path in args.runs}
    first, *others = map(drawn_terms, runs.values())
    terms = args.terms or [term for term in first if all(term in other for other in others)]
    known = {term for curves in runs.values() for term in curves} - {"iteration"}
    if not known & set(terms):
        fail(f"there is nothing to draw: --terms may be {', '.join(sorted(known))}")
    columns = 2 if len(terms) == 4 else min(3, len(terms))
    rows = -(-len(terms) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * rows), layout="constrained")
    for number, term in enumerate(terms, 1):
        draw_term(figure.add_subplot(rows, columns, number), term, runs)
    handles = {}  # of all panels, each name once
    for panel in figure.axes:
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels())))
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns + 1)
    return figure, f"{', '.join(terms)} of {len(runs)} run(s)"


def drawn_terms(curves):
    """Terms of a run that are logged, or validated more than once -> [term]"""
    names = [name for name, (x, _) in curves.items() if len(x) > 1 or VALIDATION not in name]
    terms = dict.fromkeys(name.removeprefix(VALIDATION) for name in names)
    return [term for term in terms if term not in NO_TERMS]


def draw_term(panel, term, runs):
    for number, (name, curves) in enumerate(runs.items()):
        colour = f"C{number}"
        x, y = curves.get(term, ([], []))
        marker = "o" if len(x) == 1 else None  # a line through one point is invisible
        panel.plot(x, y, marker=marker, color=colour, linewidth=1, markersize=4, alpha=0.3)
        mean = uniform_filter1d(np.array(y, float), max(3, len(y) // 20), mode="nearest")
        panel.plot(x, mean, color=colour, linewidth=1.5, label=name)
        if VALIDATION + term in curves:
            label = f"{name}, validation"
            panel.plot(*curves[VALIDATION + term], **DOTTED, color=colour, label=label)
    percent = term.endswith(("top1", "top5", "mAP")) or "R@" in term
    panel.set(title=term, xlabel="iteration", ylabel=UNITS.get(term, "%" if percent else "nats"))
    if percent:
        bottom, top = panel.get_ylim()
        panel.set_ylim(max(0, bottom), min(100, top))
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


# ------------------------------------------------------------------------------- bars, and growth


def draw_scores(args):
    """A bar per backbone from a result.json of eval_linear.py, the best on top"""
    from matplotlib.figure import Figure

    result = json.loads(Path(args.runs[-1]).read_text())
    if "backbones" not in result:
        fail(f"{args.runs[-1]} is no result.json of eval_linear.py: it has no scores of backbones")
    rows = result["backbones"]
    means = next(iter(rows.values()))["mean"]
    metric, chance = next(iter(means)), "chance" if "chance" in means else "commonest class"
    figure = Figure(figsize=(8, 1.4 + 0.55 * len(rows)), layout="constrained")
    panel = figure.add_subplot()
    labels = []
    for place, (source, row) in enumerate(rows.items()):
        score = row["mean"][metric]
        low, high = row.get("interval", {}).get(metric, (score, score))
        colour = "0.7" if source in ("random", "imagenet") else "C0"
        panel.barh(place, score, color=colour, height=0.6)
        panel.plot((low, high), (place, place), color="black", linewidth=1.5)
        panel.text(max(high, score), place, f" {score:.1f}", va="center")
        label = Path(source).parent.name if source.endswith("backbone.pth") else source
        for other, differences in row.get("differences", {}).items():
            points, (low, high) = differences[metric]["points"], differences[metric]["interval"]
            label += f"\n{points:+.1f} ({low:+.1f} to {high:+.1f}) against {other}"
        labels.append(label)
    panel.axvline(means[chance], color="black", linestyle=":", linewidth=1)
    panel.set_yticks(range(len(rows)), labels, fontsize="small")
    panel.set(xlim=(0, 100), ylim=(len(rows) - 0.5, -0.5), xlabel=f"{metric} (%)")
    panel.spines[["top", "right"]].set_visible(False)
    measured = result["args"]
    intervals = "; 95% intervals over test photos" if len(rows) > 1 else ""
    title = f"{measured['data']} {measured['root'] or ''}, {measured['protocol']}"
    figure.suptitle(f"{title}\ndotted: {chance}{intervals}", fontsize="medium")
    return figure, f"{metric} of {len(rows)} backbone(s)"


def draw_growth(args):
    """Scores over minutes, from the tables growth-PHOTOS of scores.csv; to be read on a phone"""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    tables = to_tables(read_scores(args.runs[0]))
    steps = {int(name.removeprefix("growth-")): rows for name, rows in tables.items()
             if name.startswith("growth-")}
    names = list(next(iter(steps.values())))
    figure = Figure(figsize=(5.2, 3.7), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {"mean": "Three sets (mAP)", "own_words": "Own words (mAP)"}
    for panel, (measure, title) in zip(panels, titles.items()):
        for number, name in enumerate(names):
            style = {"color": f"C{number}", "marker": "os^D"[number % 4]}
            minutes = [mean_of(rows[name]["minutes"]) for rows in steps.values()]
            scores = [mean_of(rows[name][measure]) for rows in steps.values()]
            panel.plot(minutes, scores, **style, label=name)
            # The seeds of the comparison, pale
            seeds = np.array(tables["comparison"][name][measure], float)
            x = [minutes[list(steps).index(100_096)]] * len(seeds)
            panel.plot(x, seeds, **style, alpha=0.3, linestyle="")
        random = mean_of(tables["comparison"]["Random initialisation"][measure])
        panel.axhline(random, color="grey", linestyle=":")
        panel.text(1, random, "random weights", color="grey", ha="right", va="bottom",
            transform=panel.get_yaxis_transform())
        panel.set_title(title, fontsize="medium")
        panel.set(xscale="log", xlabel="minutes of one core")
        panel.set_xticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    for x, score, photos in zip(minutes, scores, steps):  # at the last curve, on the right
        panel.annotate(f"{photos // 1000}k", (x, score), (0, -8), ha="center", va="top",
            textcoords="offset points", color=style["color"])
    panels[0].plot([], [], "o", color="grey", alpha=0.4, label="other seeds")
    panels[0].plot([], [], " ", label="25k: photos seen")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3,
        columnspacing=1, handlelength=1.5)
    return figure, ", ".join(names)


def mean_of(scores):
    return np.mean(np.array(scores, float))


if __name__ == "__main__":
    main(get_args())
