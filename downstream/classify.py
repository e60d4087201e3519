"""Zero-shot classification by class names, with a model of mmcontrastive.py [ours]

    python -m downstream.classify                            # the built-in scenes
    python -m downstream.classify --data folder --root photos --weights FOLDER/checkpoint.pth

Nothing is trained here: each photo gets the class whose name, in a caption such as "a
photo of a daisy", is nearest in the common space of photos and captions. With several labels per
photo the score is mean average precision. Draws the ten photos nearest to each class in
classify.png of --output.
"""

import argparse
from pathlib import Path

import torch

import common
import eval_linear
from common import print_main
from downstream import search


def get_args(argv=None):
    # fmt: off
    parser = argparse.ArgumentParser(description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", default="shapes", help="as of eval_linear.py: shapes, folder, voc07, coco, ...")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--val-split", help="default test for voc07, val2017 for coco, else val")
    add("--prompt", help='caption for a class (default "a photo of a {}", for shapes "a {}")')
    search.add_flags(parser, "classify")
    args = parser.parse_args(argv)
    _, val_split = eval_linear.SPLITS.get(args.data, ("train", "val"))
    args.val_split = args.val_split or val_split
    args.prompt = args.prompt or ("a {}" if args.data == "shapes" else "a photo of a {}")
    if "{}" not in args.prompt:
        parser.error(f'--prompt "{args.prompt}" has no {{}}, where the name of the class goes')
    return args


def main(args):
    model = search.Model(args)
    data = eval_linear.label_data(args.data, args.root, args.val_split)
    photos, readable = model.encode_photos(data)
    prompts = [args.prompt.replace("{}", name) for name in data.names]
    texts = model.encode(prompts)
    labels = torch.from_numpy(data.labels[readable])
    scores = eval_linear.score(photos @ texts.T, labels)
    [(metric, score)] = scores.items()
    [guess] = eval_linear.by_chance(scores, data).values()

    path = Path(args.output, "classify.png")
    search.draw_nearest(path, prompts, texts, data, photos, readable)
    result = {"metric": metric, "zero-shot": score, "guessing": guess, "images": len(photos)}
    common.save(Path(args.output, "result.json"), {"args": vars(args), **result})
    print_main(f"the photos nearest to each class are in {path}")
    scores = f"{score:.1f} {metric} by class names, {guess:.1f} by guessing"
    print_main(f"{args.data}, {len(photos)} photos of {len(data.names)} classes: {scores}")


if __name__ == "__main__":
    main(get_args())
