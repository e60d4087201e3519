"""What the downstream tasks compare a backbone with: the same one, randomly initialised."""

import argparse
import os

import common
import eval_linear

IN_WORDS = {"trained": "trained", "random": "at random initialisation"}  # in the last line printed


def backbones(args):
    """Yield ("trained" or "random", seed of the run, backbone) for --runs of each

    The backbone is None where the previous run's is used again: trained weights are the same for
    all runs, random ones are drawn anew for each.
    """
    arch = eval_linear.load_backbone(args.weights, args.arch, args.seed).arch
    names = ["random"] if args.weights == "random" else ["trained", "random"]
    for name in names:
        weights = args.weights if name == "trained" else "random"
        for seed in range(args.seed, args.seed + args.runs):
            backbone = None
            if name == "random" or seed == args.seed:
                backbone = eval_linear.load_backbone(weights, arch, seed)
            yield name, seed, backbone


def with_random_baseline(args, world, train):
    """Run train(args, world) from --weights; on shapes (minutes) also from random weights

    -> {"trained" or "random": its results}, written to result.json, too. None on all processes but
    the first, which does the second training alone: a process group cannot be joined again.
    """
    if os.path.exists(args.weights):  # Run refuses to go on from other weights of the same name
        args.weights_date = os.path.getmtime(args.weights)
    name = "random" if args.weights == "random" else "trained"
    scores = {name: train(args, world)}
    if not world.is_main:
        return None
    if name == "trained" and args.data == "shapes":
        arch = eval_linear.load_backbone(args.weights, args.arch, args.seed).arch
        changed = {"weights": "random", "arch": arch, "output": f"{args.output}/random"}
        baseline = argparse.Namespace(**{**vars(args), **changed})
        scores["random"] = train(baseline, common.World(0, 1, world.device))
    common.write_json(f"{args.output}/result.json", {"args": vars(args), **scores})
    return scores
