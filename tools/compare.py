"""All methods by their recipes on the same data: one table and one picture.

    python tools/compare.py                                    # the built-in scenes
    python tools/compare.py --seeds 3                          # mean and deviation of three runs
    python tools/compare.py --data photos.jsonl --probe-data folder --probe-root labelled
    python tools/compare.py --only virtex tp --iters 100       # further flags go to every script

Each run is the one-line command of its script and goes into a folder of its own below --output. A
run that has ended is not repeated and a killed one goes on. comparison.md, comparison.png and
result.json hold the probe of every run that has ended, beside that of random initialisation.

The supervised row learns the classes that the others are only probed on: how far labels go.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
import common
import eval_linear
from common import check, say

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
    add("--probe-data", choices=common.LABELLED, help="labelled images (default: tags of --data)")
    add("--probe-root", help="their folder")
    add("--only", nargs="+", metavar="ROW", choices=ROWS, default=list(ROWS), help="train these")
    add("--seeds", type=common.count, default=1, help="runs of each row")
    add("--processes", type=common.count, default=1, help="GPUs for each run (torchrun)")
    add("--output", default="runs/compare", help="folder of the runs, the table and the picture")
    args, args.more = parser.parse_known_args(argv)
    args.only = [name for name in ROWS if name in args.only]
    from_tp = [name for name in args.only if FROM_TP in ROWS[name][3]]
    tp = [Path(args.output, f"tp-{seed}", "backbone.pth") for seed in range(args.seeds)]
    if from_tp and "tp" not in args.only and not all(path.exists() for path in tp):
        parser.error(f"the row {from_tp[0]} starts from tp: add it to --only")
    if common.look(args.more, "--seed").seed:
        parser.error("give --seeds N instead of --seed: each run has its own seed, 0 to N - 1")
    return args


def main(args):
    recipe = common.choose_recipe({}, ["--data", args.data, *args.more])
    split = common.look(args.more, "--train-split").train_split or recipe["train_split"]
    if not args.probe_data:  # now: after the runs it would be too late
        tags = common.caption_data(args.data, args.root, split).tag_names
        check(tags, f"{args.data} has no tags to probe on: add --probe-data and --probe-root")
    for seed in range(args.seeds):
        for name in args.only:
            train(name, seed, recipe["recipe"], args)
    rows = list(filter(None, (summary(name, args.output) for name in ROWS)))
    check(rows, "no run has a probe: its data have no class with examples in both splits")
    for flag in ("arch", "data", "probe_data"):
        values = {str(row["settings"][flag]) for row in rows if row["learns_from"] != "labels"}
        found = f"{args.output} holds runs with --{flag.replace('_', '-')} {', '.join(values)}"
        check(len(values) < 2, f"{found}: they cannot be compared, choose another --output")
    output, table = Path(args.output), in_lines(rows)
    common.write_file(output / "comparison.md", lambda file: file.write(table.encode()))
    common.write_json(output / "result.json", {"rows": rows})
    draw_bars(rows, output / "comparison.png")
    say(f"\n{table}\nthe same as a picture: {output}/comparison.png")


def train(name, seed, recipe, args):
    """Run the script of a row, with its output on this screen, until it has ended."""
    method, _, script, own = ROWS[name]
    command = [REPO / script, "--seed", seed, "--output", Path(args.output, f"{name}-{seed}")]
    command += [word.format(output=args.output, seed=seed) for word in own.split()]
    for flag in ("data", "root", "probe_data", "probe_root"):
        if getattr(args, flag) is not None:
            command += [f"--{flag.replace('_', '-')}", getattr(args, flag)]
    command += args.more
    if name == "supervised" and args.probe_data not in (None, "shapes"):
        # At the end: of a flag that is given twice the last value counts.
        command += ["--data", labelled_photos(args), "--recipe", recipe, "--fraction", 1]
        command += ["--train-split", "train", "--val-split", "train"]
    if name == "supervised" and args.probe_data == "shapes":
        command += ["--data", "shapes", "--recipe", recipe]
        command += ["--train-split", "train", "--val-split", "val"]
    command = [str(word) for word in command]
    if args.processes > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={args.processes}"]
        command = ["-m", *launcher, *command]
    say(f"\n{method}, seed {seed}: python {' '.join(command)}")
    with subprocess.Popen([sys.executable, *command]) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        process.wait()  # after a SIGTERM, too: it writes its checkpoint and ends
    signal.signal(signal.SIGTERM, before)
    check(process.returncode == 0, f"{script} was stopped or ended with an error, see above")


def labelled_photos(args):
    """The probe's training images with their classes as tags -> path of a .jsonl"""
    split = eval_linear.LABEL_SPLITS[args.probe_data][0]
    data = eval_linear.label_data(args.probe_data, args.probe_root, split)
    lines, classes = [], np.arange(len(data.names))
    for n, image in enumerate(data.images):
        [labels] = eval_linear.label_columns(data.labels[n : n + 1], classes)
        tags = [data.names[k] for k in np.flatnonzero(labels == 1)]
        lines.append(json.dumps({"image": os.path.abspath(image), "tags": tags, "split": "train"}))
    path = Path(args.output, "labels.jsonl").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    common.write_file(path, lambda file: file.write("\n".join(lines + [""]).encode()))
    return path


def summary(name, output):
    """The runs of a row that have ended -> {"method", "trained": [mAP], ...}, None without any"""
    folders = [path.parent for path in sorted(Path(output).glob(f"{name}-[0-9]*/result.json"))]
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    probes = [result["probe"] for result in results if "probe" in result]
    if not probes:
        return None
    settings = json.loads((folders[0] / "args.json").read_text())
    seen = common.read_checkpoint(folders[0] / "checkpoint.pth")["iteration"]
    return {
        "method": ROWS[name][0],
        "learns_from": ROWS[name][1],
        "images": seen * settings["batch_size"],
        "trained": [probe["trained"] for probe in probes],
        "random": [probe["random"] for probe in probes],
        "settings": settings,
    }


def mean_and_deviation(scores):
    """ "31.4 ± 0.5": mean and sample standard deviation"""
    mean, deviation = eval_linear.mean_and_deviation(scores)
    return f"{mean:.1f}" if len(scores) == 1 else f"{mean:.1f} ± {deviation:.1f}"


def in_lines(rows):
    table = "| method | learns from | images seen | runs | mAP | random |\n"
    table += 6 * "|---" + "|\n"
    for row in rows:
        seen, runs = f"{row['images']:,}", len(row["trained"])
        trained, random = mean_and_deviation(row["trained"]), mean_and_deviation(row["random"])
        cells = row["method"], row["learns_from"], seen, str(runs), trained, random
        table += f"| {' | '.join(cells)} |\n"
    return table


def draw_bars(rows, path, side=30, left=220, width=520):
    """A bar per method with its deviation; the black line is the score of random initialisation."""
    font, height = ImageFont.load_default(15), len(rows) * side
    sheet = Image.new("RGB", (left + width + 110, height + 50), "white")
    draw = ImageDraw.Draw(sheet)
    scale = width / max(max(row["trained"]) for row in rows)
    for y, row in zip(range(8, height + 8, side), rows):
        middle, end = y + side / 2, left + np.mean(row["trained"]) * scale
        draw.text((left - 8, middle), row["method"], "black", font, anchor="rm")
        draw.rectangle((left, y + 4, end, y + side - 4), COLOURS[row["learns_from"]])
        random = left + np.mean(row["random"]) * scale
        draw.line((random, y + 1, random, y + side - 1), "black", 2)
        if len(row["trained"]) > 1:
            half = eval_linear.mean_and_deviation(row["trained"])[1] * scale
            draw.line((end - half, middle, end + half, middle), "black", 2)
            end += half
        place = max(end, random) + 6, middle
        draw.text(place, mean_and_deviation(row["trained"]), "black", font, anchor="lm")
    x, y = left, height + 30
    for name, colour in COLOURS.items():
        draw.rectangle((x, y - 6, x + 12, y + 6), colour)
        draw.text((x + 18, y), name, "black", font, anchor="lm")
        x += 36 + draw.textlength(name, font)
    draw.line((x, y - 8, x, y + 8), "black", 2)
    draw.text((x + 8, y), "random initialisation", "black", font, anchor="lm")
    draw.text((left - 8, y), "mAP; learned from", "black", font, anchor="rm")
    sheet.save(path)


if __name__ == "__main__":
    common.run(main, get_args)
