"""Draw the loss curves of runs from their metrics.jsonl, or the scores of backbones as bars

    python tools/plot.py runs/virtex                                  # all terms of one run
    python tools/plot.py runs/tp runs/tp-wide --output tp.png         # the terms that both have
    python tools/plot.py runs/* --tensorboard           # then: tensorboard --logdir runs
    python tools/plot.py runs/eval_linear/flowers-svm-virtex/result.json    # bars in scores.png
    python tools/plot.py docs/scores.csv --output docs/growth.png     # the picture of results.md

Curves: a panel per term, a colour per run. The pale line shows the values, and the strong one a
running mean over a twentieth of the run. Scores on the validation split are dotted, in the panel of
their term. You can draw runs that are still in progress.

Bars: result.json of eval_linear.py, which has intervals if it compared several backbones. The
interval of a difference stands below the name. It decides: those of two scores may overlap although
one is better on nearly every draw of the same photos.
"""

import argparse
import csv
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import fail

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
        help="--output of a training run, and its name; or the result.json of eval_linear.py")
    add("--terms", nargs="+", metavar="TERM", help="draw only these, such as loss images_per_s")
    add("--output", help="picture to write, a .png, .pdf or .svg (default: curves.png in the "
        "last RUN; scores.png beside result.json)")
    add("--tensorboard", action="store_true",
        help="write event files for TensorBoard into the runs, and draw no picture")
    return parser.parse_args(argv)


def main(args):
    os.environ.pop("MPLBACKEND", None)  # a Jupyter kernel's, which may not be installed here
    from matplotlib.figure import Figure  # only here: it takes a second, which --help saves
    from matplotlib.lines import Line2D

    if args.runs[0].endswith(".csv"):
        return draw_growth(args.runs[0], args.output or "growth.png")
    if args.runs[0].endswith(".json"):
        return draw_scores(args.runs[0], args.output)
    short = [Path(path).resolve().name for path in args.runs]
    names = short if len(set(short)) == len(short) else args.runs
    runs = {name: read_run(path) for name, path in zip(names, args.runs)}
    if args.tensorboard:
        return write_events(args.runs, runs.values())
    terms = args.terms or shared_terms(runs.values())
    if not terms:
        fail("the runs have no term in common: see --terms")
    columns = 2 if len(terms) == 4 else min(3, len(terms))
    rows = -(-len(terms) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for term, panel in zip(terms, panels):
        draw_term(panel, term, runs)
    for panel in list(panels):  # unused ones in the last row
        panel.remove()
    handles = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels())))
    if any(VALIDATION + term in curves for term in terms for curves in runs.values()):
        handles["on the validation split"] = Line2D([], [], **DOTTED, color="grey")
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns + 1)
    output = args.output or Path(args.runs[-1], "curves.png")
    figure.savefig(output, dpi=150)
    print(f"{', '.join(terms)} of {len(runs)} run(s): {output}")


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


def write_events(paths, runs):
    """Write TensorBoard's event files; they replace those of an earlier call."""
    if not importlib.util.find_spec("tensorboard"):
        fail("--tensorboard: pip install tensorboard first")
    from torch.utils.tensorboard import SummaryWriter

    for path, curves in zip(paths, runs):
        for old in Path(path).glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(path) as writer:
            for term, (x, y) in curves.items():
                for step, value in zip(x, y):
                    writer.add_scalar(term, value, step)
    print(f"tensorboard --logdir {Path(paths[0]).parent}")


def shared_terms(runs):
    """Terms of which all runs have a curve, in the order of the first run: the loss, its parts"""
    terms = [drawn_terms(curves) for curves in runs]
    return [term for term in terms[0] if all(term in others for others in terms)]


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
        panel.plot(x, running_mean(y), color=colour, linewidth=1.5, label=name)
        if VALIDATION + term in curves:
            panel.plot(*curves[VALIDATION + term], **DOTTED, color=colour, clip_on=False)
    percent = term.endswith(("top1", "top5", "mAP")) or "R@" in term
    panel.set(title=term, xlabel="iteration", ylabel=UNITS.get(term, "%" if percent else "nats"))
    if percent:
        bottom, top = panel.get_ylim()
        panel.set_ylim(max(0, bottom), min(100, top))
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def draw_scores(path, output):
    """Bars from a result.json of eval_linear.py: a panel per metric, the best on top"""
    from matplotlib.figure import Figure

    result = json.loads(Path(path).read_text())
    if "backbones" not in result:
        fail(f"{path} is no result.json of eval_linear.py: it has no scores of backbones")
    rows = result["backbones"]
    *means, chance = next(iter(rows.values()))["mean"].items()
    metrics = list(next(iter(rows.values())).get("interval", means[0][:1]))
    figure = Figure(figsize=(8, 1 + (0.4 + 0.55 * len(rows)) * len(metrics)), layout="constrained")
    panels = figure.subplots(len(metrics), squeeze=False, sharex=True).flat
    for metric, panel in zip(metrics, panels):
        for place, (source, row) in enumerate(rows.items()):
            score = row["mean"][metric]
            low, high = row.get("interval", {}).get(metric, (score, score))
            colour = "0.7" if source in ("random", "imagenet") else "C0"
            panel.barh(place, score, color=colour, height=0.6)
            panel.plot((low, high), (place, place), color="black", linewidth=1.5)
            panel.text(max(high, score), place, f" {score:.1f}", va="center")
        panel.axvline(chance[1], color="black", linestyle=":", linewidth=1)
        labels = [bar_label(source, row, metric) for source, row in rows.items()]
        panel.set_yticks(range(len(rows)), labels, fontsize="small")
        panel.set(xlim=(0, 100), ylim=(len(rows) - 0.5, -0.5), xlabel=f"{metric} (%)")
        panel.spines[["top", "right"]].set_visible(False)
    args = result["args"]
    intervals = "; 95% intervals over test photos" if len(rows) > 1 else ""
    title = f"{args['data']} {args['root'] or ''}, {args['protocol']}"
    figure.suptitle(f"{title}\ndotted: {chance[0]}{intervals}", fontsize="medium")
    output = output or Path(path).with_name("scores.png")
    figure.savefig(output, dpi=150)
    print(f"{', '.join(metrics)} of {len(rows)} backbone(s): {output}")


def bar_label(source, row, metric):
    """The folder of a backbone.pth, or the source; how far it is from random or another row"""
    lines = [Path(source).parent.name if source.endswith("backbone.pth") else source]
    for other, differences in row.get("differences", {}).items():
        points, (low, high) = differences[metric]["points"], differences[metric]["interval"]
        lines.append(f"{points:+.1f} ({low:+.1f} to {high:+.1f}) against {other}")
    return "\n".join(lines)


def draw_growth(path, output):
    """Scores over minutes, from the tables growth-PHOTOS of scores.csv; to be read on a phone"""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    tables = {}  # {table: {(row, measure): scores of the seeds}}
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            scores = [float(score) for score in line["scores"].split()]
            tables.setdefault(line["table"], {})[line["row"], line["measure"]] = scores
    seen = [int(name.removeprefix("growth-")) for name in tables if name.startswith("growth-")]
    steps = [tables[f"growth-{photos}"] for photos in seen]
    names = list(dict.fromkeys(name for name, _ in steps[0]))

    figure = Figure(figsize=(5.2, 3.7), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {"mean": "Three sets (mAP)", "own_words": "Own words (mAP)"}
    for panel, (measure, title) in zip(panels, titles.items()):
        for number, name in enumerate(names):
            style = {"color": f"C{number}", "marker": "os^D"[number % 4]}
            minutes = [step[name, "minutes"][0] for step in steps]
            scores = [np.mean(step[name, measure]) for step in steps]
            panel.plot(minutes, scores, **style, label=name)
            for x, photos in zip(minutes, seen):
                if photos == 100_096:  # the seeds of the comparison, pale
                    seeds = tables["comparison"][name, measure]
                    panel.plot([x] * len(seeds), seeds, **style, alpha=0.3, linestyle="")
        random = np.mean(tables["comparison"]["Random initialisation", measure])
        panel.axhline(random, color="grey", linestyle=":")
        panel.text(1, random, "random weights", color="grey", ha="right", va="bottom",
            transform=panel.get_yaxis_transform())
        panel.set_title(title, fontsize="medium")
        panel.set(xscale="log", xlabel="minutes of one core")
        panel.set_xticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    for x, score, photos in zip(minutes, scores, seen):  # at the last curve, on the right
        panel.annotate(f"{photos // 1000}k", (x, score), (0, -8), ha="center", va="top",
            textcoords="offset points", color=style["color"])
    panels[0].plot([], [], "o", color="grey", alpha=0.4, label="other seeds")
    panels[0].plot([], [], " ", label="25k: photos seen")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3,
        columnspacing=1, handlelength=1.5)
    figure.savefig(output, dpi=150)
    print(f"{', '.join(names)}: {output}")


def running_mean(y):
    """The mean of each value and its neighbours, a twentieth of all together, three at least"""
    half = max(1, len(y) // 40)
    return [np.mean(y[max(0, n - half) : n + half + 1]) for n in range(len(y))]


if __name__ == "__main__":
    main(get_args())
