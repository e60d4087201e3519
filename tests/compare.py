"""One table and one picture of all methods: trained on the same photos with the same backbone for as many iterations, and
probed alike, beside the backbone at random initialisation and one trained with labels.

    python tests/compare.py                                            # the built-in scenes, about an hour on two cores
    python tests/compare.py --data coco --root flickr8k --train-split train --val-split val --image-size 96 --iters 4688 \\
        --probe-data folder --probe-root flowers --output runs/flickr8k
    python tests/compare.py ... --only virtex tp                       # these rows now, on this machine
    python tests/compare.py ... --processes 8                          # each run on eight GPUs

Writes comparison.md, comparison.png and result.json into --output, and each run into a folder of its own there. A run that
has ended is not repeated, a killed one goes on; so a row may as well be trained by hand, with flags of your own, into
OUTPUT/NAME. The flags that differ stand in METHODS: on real photos they suit short runs of small batches, measured on
Flickr8k; the papers' recipes are in the README. Nothing is downloaded. ICMLM trains a small BERT on the captions first, from
which on real photos the contrastive rows that read captions start: the table does not count its 300 or 2,000 iterations.

The supervised row learns from labels: on the built-in scenes the shapes in as many scenes as the others see, elsewhere the
classes of the photos that the probe is trained on.
"""

import argparse
import json
import os
import re
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
import probe
from common import fail, say

NO_CAPTIONS = "--lambda-tag 0 --lambda-cc 0 --lambda-ic 0 --lambda-ci 0"
INTER_MODAL = "--lambda-ii 0 --lambda-cc 0 --lambda-tag 0 --intra-dim 1024"
CONTRASTIVE = "--bn-splits 4 --queue 512 --momentum 0.998 --mlp-hidden 1024 --optimizer radam --lr 1e-3 --text-lr 1e-3"
CAPTIONS = "--caption-views sibling --lm {output}/icmlm/language_model --lambda-tag 0 --lambda-ic 0.2 --lambda-ci 0.2"
SGD = "--optimizer sgd --lr 0.03"
ICMLM = "--lm scratch --lm-iters 2000 --optimizer radam --steps 0.8 --lambda-tp 1"
FROM_TP = "--init {output}/tp/backbone.pth"
METHODS = {
    # folder         name, what it learns from, script               its flags on shapes, on real photos
    "virtex":        ("VirTex", "captions", "virtex.py",              "", "--hidden 512 --lr 0.2 --text-lr 0.1"),
    "tp":            ("TP-Postag", "captions", "tp.py",               "", SGD),
    "tp-longer":     ("... as long again", "captions", "tp.py",       FROM_TP, f"{FROM_TP} {SGD}"),
    "icmlm":         ("ICMLM-tfm", "captions", "icmlm.py",            "", f"{ICMLM} --lr 1e-3"),
    "icmlm-att-fc":  ("ICMLM-att-fc, from TP's backbone", "captions", "icmlm.py",
                      f"--head att-fc {FROM_TP} --warmup-attention 0.4", f"--head att-fc {FROM_TP} --warmup-attention 0.25 {ICMLM} --lr 5e-4"),
    "mmcontrastive": ("Multimodal contrastive", "captions", "mmcontrastive.py", "", f"{CONTRASTIVE} {CAPTIONS}"),
    "inter-modal":   ("... between photos and captions only", "captions", "mmcontrastive.py",
                      INTER_MODAL, f"{CONTRASTIVE} {CAPTIONS} {INTER_MODAL} --lr 5e-4 --text-lr 5e-4"),
    "moco":          ("MoCo-v2", "photos", "mmcontrastive.py",        NO_CAPTIONS, f"{CONTRASTIVE} {NO_CAPTIONS}"),
    "labels":        ("Supervised", "labels", "tp.py",                "--labels instances", f"--labels instances {SGD}"),
    "random":        ("Random initialisation", "nothing", None,       "", ""),
}  # fmt: skip


def get_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=common.help_formatter({}))
    parser.add_argument("--data", default="shapes", help="shapes, coco, vg or a .jsonl file")
    parser.add_argument("--root", help="folder of the data set (default datasets/<name>)")
    parser.add_argument("--train-split", help="as of the scripts")
    parser.add_argument("--val-split", help="as of the scripts")
    parser.add_argument("--fraction", type=float, default=1.0, help="as of the scripts: train on this part of the captioned photos")
    parser.add_argument("--arch", default="resnet18", choices=sorted(common.BACKBONES))
    parser.add_argument("--image-size", type=int, default=64, help="side of the images, of training and of the probe")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--iters", type=int, default=1200, help="of every method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count()))
    parser.add_argument("--probe-data", default="shapes", choices=sorted(common.LABEL_SPLITS), help="labelled images for the probe and for the supervised row")
    parser.add_argument("--probe-root", help="their folder")
    parser.add_argument("--protocol", default="svm-virtex", choices=eval_linear.EXTRACTED, help="of the probe, see eval_linear.py")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), help="train and probe these rows; the table has every row that is there")
    parser.add_argument("--processes", type=int, default=1, help="GPUs of this machine for each run (torchrun)")
    parser.add_argument("--output", default="runs/compare")
    args = parser.parse_args(argv)
    args.only = [name for name in METHODS if name in args.only]
    for name in args.only:  # some start from what others leave
        for needed in rows_read(own_flags(name, args)):
            if needed not in args.only and not Path(args.output, needed, "result.json").exists():
                fail(f"the row {name} starts from {needed}: add it to --only")
    if args.data != "shapes" and args.probe_data == "shapes":
        fail("--probe-data and --probe-root are needed: the labelled photos on which the backbones are to be measured")
    if args.protocol in eval_linear.TRAINED and args.probe_data != "folder":
        fail(f"--protocol {args.protocol} wants one label per image: --probe-data folder")
    if args.batch_size > 512 or args.batch_size % 4 or args.batch_size < 8:
        fail(f"--batch-size {args.batch_size}: the contrastive rows want a multiple of 4 (--bn-splits) from 8 to 512 (--queue)")
    return args


def main(args):
    output = Path(args.output)
    there = lambda: [name for name in METHODS if (output / name / "probe" / "result.json").exists()]
    for name in there():  # nothing that cannot be compared is begun, or made anew over what is there
        row(name, args)
    for split in common.LABEL_SPLITS[args.probe_data]:
        probe.label_data(args.probe_data, args.probe_root, split)
    for number, name in enumerate(args.only, 1):
        say(f"\n[{number} of {len(args.only)}] {METHODS[name][0]}")
        if METHODS[name][2]:
            train(name, args)
        weights = output / name / "backbone.pth" if METHODS[name][2] else "random"
        python(
            args, "eval_linear.py", "--weights", weights, *(("--arch", args.arch) if weights == "random" else ()), *given(args, "image_size", "seed", "workers"),
            "--protocol", args.protocol, "--data", args.probe_data, *(("--root", args.probe_root) if args.probe_root else ()),
            "--output", output / name / "probe",
        )  # fmt: skip

    rows = [row(name, args) for name in there()]
    metric = next(key for key in ("mAP", "top-1") if key in rows[0]["scores"])
    lines = ["| method | learns from | iterations | " + f"{metric} |", "|---|---|---|---|"]
    lines += [f"| {r['method']} | {r['learns_from']} | {' + '.join(map(str, r['iterations'])) or 'none'} | {r['scores'][metric]:.1f} |" for r in rows]
    common.write_file(output / "comparison.md", lambda file: file.write("\n".join(lines + [""]).encode()))
    common.write_json(output / "result.json", {"args": vars(args), "metric": metric, "rows": rows})
    draw_bars([(r["method"], r["learns_from"], r["scores"][metric]) for r in rows], metric, output / "comparison.png")
    say("\n" + "\n".join(lines) + f"\n\nthe same as a picture: {output / 'comparison.png'}")


def train(name, args):
    """One run into its folder, unless one has ended there."""
    script = METHODS[name][2]
    folder = Path(args.output, name)
    if (folder / "result.json").exists():
        check_run(name, args)
        say(f"{folder} holds a run that has ended: it is not repeated")
        return
    data = given(args, "data", "root", "train_split", "val_split", "fraction")
    if name == "labels":
        data = labelled_photos(args)
    own = [word.format(output=args.output) for word in own_flags(name, args).split()]
    python(args, script, *data, *given(args, "arch", "image_size", "batch_size", "iters", "seed", "workers"), *own, "--output", folder)


def own_flags(name, args):
    return METHODS[name][3 if args.data == "shapes" else 4]


def rows_read(flags, file=""):
    """-> the rows whose folders, or a `file` in them, the flags name"""
    return re.findall(r"{output}/([^/ ]+)/" + file, flags)


def given(args, *flags):
    """-> the flags that have a value, as on a command line"""
    return [text for flag in flags if getattr(args, flag) is not None for text in (f"--{flag.replace('_', '-')}", str(getattr(args, flag)))]


def labelled_photos(args):
    """The labels that the supervised row learns from -> flags of tp.py"""
    if args.probe_data == "shapes":
        return ["--data", "shapes"]
    data = probe.label_data(args.probe_data, args.probe_root, common.LABEL_SPLITS[args.probe_data][0])
    tags = [[data.names[n] for n in np.flatnonzero(labels == 1)] for labels in data.labels]  # none for those with difficult ones only
    lines = [json.dumps({"image": os.path.abspath(image), "tags": names, "split": "train"}) for image, names in zip(data.images, tags)]
    path = Path(args.output, "labels.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    common.write_file(path, lambda file: file.write("\n".join(lines + [""]).encode()))
    return ["--data", path, "--val-split", "train"]  # what it then says of validation is about training; the table is not


def python(args, script, *flags):
    """Run one of our scripts, its output on this screen; its failure is ours, and our end (SIGTERM) its."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.processes}"] if args.processes > 1 else []
    command = [str(text) for text in (*launcher, REPO / script, *flags)]
    say(" ".join(["python", *launcher, script, *map(str, flags)]))
    with subprocess.Popen([sys.executable, *command]) as run:
        before = signal.signal(signal.SIGTERM, lambda *_: run.terminate())  # it writes its checkpoint; then we end, too
        code = run.wait()
    signal.signal(signal.SIGTERM, before)
    if code:
        fail(f"{script} was stopped, or ended with an error: see above")


def row(name, args):
    """One line of the table: {"name", "method", "learns_from", "iterations", "scores"}"""
    result = Path(args.output, name, "probe", "result.json")
    check(result, args, "image_size", "protocol", "seed", *(("arch",) if name == "random" else ()), data="probe_data", root="probe_root")
    runs = [*rows_read(own_flags(name, args), "backbone.pth"), name] if METHODS[name][2] else []  # what this backbone was trained in
    iterations = [check_run(run, args) for run in runs]
    return {"name": name, "method": METHODS[name][0], "learns_from": METHODS[name][1], "iterations": iterations, "scores": json.loads(result.read_text())["mean"]}


def check_run(name, args):
    """Refuse a run that is not of this comparison -> its iterations"""
    folder = Path(args.output, name)
    check(folder / "args.json", args, "arch", "image_size", "batch_size", "seed", *(("data", "root", "train_split", "fraction") if name != "labels" else ()))
    iterations = common.read_checkpoint(folder / "checkpoint.pth")["iteration"]
    if iterations != args.iters:
        fail(f"{folder} holds a run of {iterations} iterations, not {args.iters}: give its --iters, or choose another --output")
    return iterations


def check(path, args, *same, **named):
    """Refuse what was made with other flags: it could not be compared."""
    content = json.loads(path.read_text())
    before = content.get("args", content)
    for flag, ours in {**dict(zip(same, same)), **named}.items():
        wanted, found = getattr(args, ours), before[flag]
        if wanted is not None and found != wanted and not (flag == "root" and found and os.path.realpath(found) == os.path.realpath(wanted)):
            fail(f"{path} says --{flag.replace('_', '-')} {found}, not {wanted}: choose another --output")


def draw_bars(rows, metric, path, side=28, left=290, width=500):
    """rows: [(method, learns_from, score), ...] -> horizontal bars; a line through all of them at the score without training"""
    colours = {"captions": "#3b6fb6", "photos": "#8a6fb0", "labels": "#4d9a5b", "nothing": "#999999"}
    font, height = ImageFont.load_default(15), len(rows) * side
    sheet = Image.new("RGB", (left + width + 60, height + 48), "white")
    draw = ImageDraw.Draw(sheet)
    scale = width / max(score for *_, score in rows)
    tops = range(8, height, side)
    for y, (method, learns_from, score) in zip(tops, rows):
        draw.text((left - 8, y + side / 2), method, "black", font, anchor="rm")
        draw.rectangle((left, y + 3, left + score * scale, y + side - 3), colours[learns_from])
    for _, learns_from, score in rows:
        if learns_from == "nothing":
            draw.line((left + score * scale, 8, left + score * scale, height + 8), colours["nothing"])
    for y, (*_, score) in zip(tops, rows):  # last, on white: legible on the line, too
        x, text = left + score * scale + 6, f"{score:.1f}"
        draw.rectangle((x - 3, y + 3, x + draw.textlength(text, font) + 3, y + side - 3), "white")
        draw.text((x, y + side / 2), text, "black", font, anchor="lm")
    x = left
    for learns_from, colour in colours.items():
        draw.rectangle((x, height + 20, x + 12, height + 32), colour)
        draw.text((x + 18, height + 26), learns_from, "black", font, anchor="lm")
        x += 36 + draw.textlength(learns_from, font)
    draw.text((left - 8, height + 26), f"{metric}; learned from", "black", font, anchor="rm")
    sheet.save(path)


if __name__ == "__main__":
    common.run(main, get_args)
