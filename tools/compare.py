"""All methods by their recipes on the same data: one table and one picture.

    python tools/compare.py                                    # the built-in scenes
    python tools/compare.py --seeds 3                          # mean and deviation of three runs
    python tools/compare.py --data photos.jsonl --probe-data folder --probe-root labelled
    python tools/compare.py --only virtex tp --iters 100       # further flags go to every script

Each run is the one-line command of its script and goes into a folder of its own below --output. A
killed run goes on, and one that has ended is only probed again. comparison.md, comparison.png and
result.json hold the probe of every run that has ended, beside that of random initialisation.

The supervised row learns the classes that the others are only probed on: how far labels go.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
import common
import eval_linear
import svm
from common import positive_int, print_main, require

NO_CAPTIONS = "--lambda-tag 0 --lambda-cc 0 --lambda-ic 0 --lambda-ci 0"
INTER_MODAL = "--lambda-ii 0 --lambda-cc 0 --lambda-tag 0"
FROM_TP = "--init {output}/tp-{seed}/backbone.pth"
ATT_FC = f"{FROM_TP} --head att-fc"
TP_LABEL = "--labels instances"
# fmt: off
ROWS = {  #           method                    learns from  script              its own flags
    "virtex":        ("VirTex",                 "captions", "virtex.py",        ""),
    "tp":            ("TP-Postag",              "captions", "tp.py",            ""),
    "icmlm":         ("ICMLM-tfm",              "captions", "icmlm.py",         ""),
    "icmlm-from-tp": ("ICMLM-tfm from TP",      "captions", "icmlm.py",         FROM_TP),
    "att-fc":        ("ICMLM-att-fc from TP",   "captions", "icmlm.py",         ATT_FC),
    "mmcontrastive": ("Multimodal contrastive", "captions", "mmcontrastive.py", ""),
    "inter-modal":   ("... inter-modal only",   "captions", "mmcontrastive.py", INTER_MODAL),
    "moco":          ("MoCo-v2",                "photos",   "mmcontrastive.py", NO_CAPTIONS),
    "supervised":    ("Supervised",             "labels",   "tp.py",            TP_LABEL),
}
# fmt: on
COLOURS = {"captions": "#3b6fb6", "photos": "#8a6fb0", "labels": "#4d9a5b"}


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--data", default="shapes", help="as of the scripts")
    add("--root", help="as of the scripts")
    add("--probe-data", help="as of the scripts: labelled images (default: tags of --data)")
    add("--probe-root", help="their folder")
    add("--only", nargs="+", metavar="ROW", choices=ROWS, default=list(ROWS), help="train these")
    add("--seeds", type=positive_int, default=1, help="runs of each row")
    add("--processes", type=positive_int, default=1, help="GPUs for each run (torchrun)")
    add("--output", default="runs/compare", help="folder of the runs, the table and the picture")
    args, args.script_flags = parser.parse_known_args(argv)
    args.only = [name for name in ROWS if name in args.only]
    from_tp = [name for name in args.only if FROM_TP in ROWS[name][3]]
    tp = [Path(args.output, f"tp-{seed}", "backbone.pth") for seed in range(args.seeds)]
    all_there = all(path.exists() for path in tp)
    if from_tp and "tp" not in args.only and not all_there:
        parser.error(f"the row {from_tp[0]} starts from tp: add it to --only")
    if common.peek(args.script_flags, "--seed").seed:
        parser.error("give --seeds N instead of --seed: each run has its own seed, 0 to N - 1")
    return args


def main(args):
    recipe = common.choose_recipe({}, ["--data", args.data, *args.script_flags])
    if not args.probe_data:  # now: after the runs it would be too late
        given = common.peek(args.script_flags, "--train-split").train_split
        data = common.caption_data(args.data, args.root, given or recipe["train_split"])
        hint = "add --probe-data and --probe-root"
        require(data.tag_names, f"{args.data} has no tags to probe on: {hint}")
    for seed in range(args.seeds):
        for name in args.only:
            train(name, seed, recipe["recipe"], args)
    summaries = [summary(name, args.output) for name in ROWS]
    rows = [row for row in summaries if row]
    require(rows, "no run has a probe: its data have no class with examples in both splits")
    check_comparable(rows, args.output)
    output = Path(args.output)
    table = as_table(rows)
    (output / "comparison.md").write_text(table)
    common.write_json(output / "result.json", {"rows": rows})
    draw_bars(rows, output / "comparison.png")
    print_main(f"\n{table}\nthe same as a picture: {output}/comparison.png")


def train(name, seed, recipe, args):
    """Run the script of a row, with its output on this screen, until it has ended."""
    method, _, script, own = ROWS[name]
    command = [REPO / script, "--seed", seed, "--output", Path(args.output, f"{name}-{seed}")]
    command += [word.format(output=args.output, seed=seed) for word in own.split()]
    for flag in ("data", "root", "probe_data", "probe_root"):
        if getattr(args, flag) is not None:
            command += [f"--{flag.replace('_', '-')}", getattr(args, flag)]
    command += args.script_flags
    if name == "supervised" and args.probe_data:
        # At the end: of a flag that is given twice the last value counts.
        command += ["--recipe", recipe, "--train-split", "train"]
        if args.probe_data == "shapes":
            command += ["--data", "shapes", "--val-split", "val"]
        else:
            command += ["--data", labelled_photos(args), "--val-split", "train"]
    command = [str(word) for word in command]
    if args.processes > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={args.processes}"]
        command = ["-m", *launcher, *command]
    print_main(f"\n{method}, seed {seed}: python {' '.join(command)}")
    process = subprocess.run([sys.executable, *command])
    require(process.returncode == 0, f"{script} was stopped or ended with an error, see above")


def labelled_photos(args):
    """The probe's training images with their classes as tags -> path of a .jsonl"""
    split, _ = eval_linear.LABEL_SPLITS.get(args.probe_data, ("train", "val"))
    data = eval_linear.label_data(args.probe_data, args.probe_root, split)
    present = svm.label_columns(data.labels, np.arange(len(data.names))) == 1
    lines = []
    for image, row in zip(data.images, present):
        tags = [data.names[k] for k in np.flatnonzero(row)]
        line = {"image": os.path.abspath(image), "tags": tags, "split": "train"}
        lines.append(json.dumps(line) + "\n")
    path = Path(args.output, "labels.jsonl").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


# -------------------------------------------------------------------------------------- the table


def summary(name, output):
    """The runs of a row that have ended -> {"method", "trained": [mAP], ...}, None without any"""
    method, learns_from, _, _ = ROWS[name]
    folders = [path.parent for path in sorted(Path(output).glob(f"{name}-[0-9]*/result.json"))]
    probes = []
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        if "probe" in result:
            probes.append(result["probe"])
    if not probes:
        return None
    settings = json.loads((folders[0] / "args.json").read_text())
    iterations = common.read_checkpoint(folders[0] / "checkpoint.pth")["iteration"]
    return {
        "method": method,
        "learns_from": learns_from,
        "images": iterations * settings["batch_size"],
        "trained": [probe["trained"] for probe in probes],
        "random": [probe["random"] for probe in probes],
        "settings": settings,
    }


def check_comparable(rows, output):
    for flag in ("arch", "data", "probe_data"):
        others = [row for row in rows if row["learns_from"] != "labels"]
        values = {str(row["settings"][flag]) for row in others}
        different = f"runs with --{flag.replace('_', '-')} {', '.join(values)}"
        hint = "they cannot be compared, choose another --output"
        require(len(values) < 2, f"{output} holds {different}: {hint}")


def mean_and_deviation(scores):
    """ "31.4 ± 0.5": mean and sample standard deviation"""
    mean, deviation = eval_linear.mean_and_deviation(scores)
    return f"{mean:.1f}" if len(scores) == 1 else f"{mean:.1f} ± {deviation:.1f}"


def as_table(rows):
    lines = [
        "| method | learns from | images seen | runs | mAP | random |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["method"], row["learns_from"], f"{row['images']:,}", str(len(row["trained"]))]
        cells += [mean_and_deviation(row["trained"]), mean_and_deviation(row["random"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_bars(rows, path, side=30, left=220, width=520):
    """A bar per method with its deviation; the black line is the score of random initialisation."""
    font = ImageFont.load_default(15)
    height = len(rows) * side
    sheet = Image.new("RGB", (left + width + 110, height + 50), "white")
    draw = ImageDraw.Draw(sheet)
    scale = width / max(max(row["trained"]) for row in rows)  # pixels per point of mAP
    for n, row in enumerate(rows):
        top = 8 + n * side
        middle = top + side / 2
        end = left + np.mean(row["trained"]) * scale
        random = left + np.mean(row["random"]) * scale
        draw.text((left - 8, middle), row["method"], "black", font, anchor="rm")
        bar = left, top + 4, end, top + side - 4
        draw.rectangle(bar, COLOURS[row["learns_from"]])
        line = random, top + 1, random, top + side - 1
        draw.line(line, "black", 2)
        if len(row["trained"]) > 1:
            _, deviation = eval_linear.mean_and_deviation(row["trained"])
            half = deviation * scale
            draw.line((end - half, middle, end + half, middle), "black", 2)
            end += half
        behind = max(end, random) + 6, middle
        score = mean_and_deviation(row["trained"])
        draw.text(behind, score, "black", font, anchor="lm")
    draw_legend(draw, left, height + 30, font)
    sheet.save(path)


def draw_legend(draw, x, y, font):
    draw.text((x - 8, y), "mAP; learned from", "black", font, anchor="rm")
    for name, colour in COLOURS.items():
        square = x, y - 6, x + 12, y + 6
        draw.rectangle(square, colour)
        draw.text((x + 18, y), name, "black", font, anchor="lm")
        x += 36 + draw.textlength(name, font)
    draw.line((x, y - 8, x, y + 8), "black", 2)
    draw.text((x + 8, y), "random initialisation", "black", font, anchor="lm")


if __name__ == "__main__":
    common.run(main, get_args)
