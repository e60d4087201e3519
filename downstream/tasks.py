"""What the tasks share: flags, frozen backbones, their features, runs compared, and the report"""

import argparse
from functools import partial
from pathlib import Path

import torch

import common
import eval_linear
from common import fail, number, print_main
from extras import checkpoints, layers

IN_WORDS = {"trained": "trained", "random": "at random initialisation"}  # in the last line printed


def add_flags(parser, data=None, amp="off"):
    """Which backbone, on which data.  data: the choices of --data, if not any captioned photos"""
    add = parser.add_argument_group("backbone, data and run").add_argument
    add("--weights", default="runs/virtex/backbone.pth",
        help="the backbone: a file that eval_linear.py reads, imagenet or random")
    add("--arch", choices=common.BACKBONES, help="network; needed for imagenet and random")
    add("--data", default="shapes", choices=data, help="data set; shapes is built in" if data else
        "data set: shapes (built in), coco, vg, a .jsonl file or a folder of shards")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--train-split", help="split to train on (default train, or as named by the data set)")
    add("--val-split", help="split to test on (default val, or as named by the data set)")
    add("--image-size", type=number("int > 0"), help="crop side in pixels (default: that of the "
        "weights' training, from args.json beside them; else 224, or 48 for shapes)")
    add("--workers", type=number("int >= 0"), default=common.default_workers(measuring=True),
        help="processes that load photos; with 0 the main process does")
    add("--seed", type=number("int >= 0"), default=0, help="random seed, of the first run")
    add("--amp", choices=common.PRECISIONS, default=amp,
        help=f"precision (default {amp or 'bf16 if supported'})")
    add("--output", help="folder for the results (default runs/TASK, or runs/TASK-DATA)")


def add_weights(parser, method):
    """--weights of the programs that use a trained model of a method"""
    parser.add_argument("--weights", default=f"runs/{method}/checkpoint.pth",
        help=f"checkpoint.pth or model_N.pth of {method}.py; if you trained on photos.jsonl, it "
        f"is in runs/{method}-photos (default %(default)s)")


def read_model(script, path):
    """-> what a checkpoint.pth or model_N.pth of a script holds; says what it was trained on"""
    others = sorted(map(str, Path("runs").glob(f"{script}*/checkpoint.pth")))
    if others and not Path(path).exists():
        fail(f"there is no {path}: give --weights one of {', '.join(others)}")
    content = checkpoints.of_script(script, path)
    print_main(f"{path}: trained on {content['args']['data']}")
    return content


def fill_defaults(parser, args, script, **defaults):
    """Give flags that were left out these defaults, or those that depend on --data."""
    args.script = script
    if args.weights in ("random", "imagenet") and not args.arch:
        parser.error(f"--weights {args.weights} needs --arch")
    if args.weights.startswith("clip:"):
        parser.error("--weights clip:NAME is for eval_linear.py only")
    year = "2017" if args.data == "coco" else ""
    size = eval_linear.trained_with(args.weights, "image_size")
    size = size or (48 if args.data == "shapes" else 224)
    usual = {"train_split": f"train{year}", "val_split": f"val{year}", "image_size": size}
    usual["output"] = f"runs/{script}-{Path(args.data).stem}".removesuffix("-shapes")
    for name, value in (usual | defaults).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def read_coco(path):
    """A JSON file in the format of COCO -> its content"""
    content = common.read_json(path)
    if "annotations" not in content:
        fail(f"{path} has no annotations. Is it of a test split without labels, or in a format "
             "other than COCO's?")
    return content


# --------------------------------------------------------------------- tasks on frozen backbones


def begin(args):
    """Features take one process: the others end here -> device"""
    eval_linear.run_alone()
    common.make_folder(args.output)
    return common.init_distributed()


def backbones(args, device):
    """Yield ("trained" or "random", seeds of its runs, frozen backbone)

    Trained weights are the same for all --runs, random ones are drawn anew for each.
    """
    arch = eval_linear.load_backbone(args.weights, args.arch, args.seed).arch
    seeds = range(args.seed, args.seed + args.runs)
    groups = [] if args.weights == "random" else [("trained", args.weights, seeds)]
    groups += [("random", "random", [seed]) for seed in seeds]
    for name, weights, of_runs in groups:
        backbone = eval_linear.load_backbone(weights, arch, of_runs[0])
        backbone.to(device, memory_format=torch.channels_last)
        yield name, of_runs, backbone.eval().requires_grad_(False)


def central_features(backbone, data, args, device, features_of=eval_linear.pooled):
    """Of the central squares -> `data` of the photos that can be decoded; their features (M, D)

    features_of(backbone, uint8 (B, size, size, 3), amp=) -> (B, D)
    """
    squares = eval_linear.CentralSquares(data, args.image_size)
    features_of = partial(features_of, backbone, amp=args.amp)
    x, readable = eval_linear.run_over_photos(features_of, squares, args, device)
    return data.select(readable), x


# ------------------------------------------------------------------------- tasks that fine-tune


def compared_runs(args):
    """-> {"trained": args}, of --weights random {"random": args}; on shapes (minutes) both

    A file that cannot be read ends the run here.
    """
    backbone = eval_linear.load_backbone(args.weights, args.arch, args.seed)
    args.arch = backbone.arch
    args.weights_hash = layers.hash_of_weights(backbone)  # a path may get other weights
    if args.weights == "random":
        return {"random": args}
    runs = {"trained": args}
    if args.data == "shapes":
        changed = {"weights": "random", "output": f"{args.output}/random"}
        runs["random"] = argparse.Namespace(**{**vars(args), **changed})
    return runs


def report_trainings(scores, args, task, metric):
    """The last line of main.  scores: {"trained" or "random": {metric: percent}}; see `report`"""
    if common.is_main():
        report({name: [of_run] for name, of_run in scores.items()}, args, task, metric)
    common.end_distributed()


# --------------------------------------------------------------------------------------- report


def report(runs, args, task, metric, in_words=IN_WORDS):
    """Print all scores, write result.json; the last line compares them by `metric`

    runs: {name: [{metric: percent} of each run]}.  in_words: {name: how the last line calls it}
    """
    content = {"args": vars(args), "std": {}, "runs": runs}
    for name, scores in runs.items():
        results = eval_linear.over_runs(scores)
        content[name], content["std"][name] = results["mean"], results["std"]
        print_main(f"{name:18} {eval_linear.format_scores(results['mean'])}")
        if len(scores) > 1:
            print_main(f"{'':16} ± {eval_linear.format_scores(results['std'])}")
    common.save(f"{args.output}/result.json", content | common.circumstances())
    scores = [f"{content[name][metric]:.1f} {in_words[name]}" for name in runs]
    print_main(f"{task} {args.data}: {metric} {', '.join(scores)}")
