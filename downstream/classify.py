"""Zero-shot classification by class names, with a model of mmcontrastive.py [ours]

    python -m downstream.classify                            # the built-in scenes
    python -m downstream.classify --data folder --root photos --weights FOLDER/checkpoint.pth

Nothing is trained here. Each photo gets the class whose name, in a caption such as "a photo of a
daisy", is nearest in the common space of photos and captions (downstream/search.py). The names
golden_retriever and GoldenRetriever are read as golden retriever. Draws the ten photos nearest to
each class in classify.png of --output.
"""

import re
from pathlib import Path

import torch

import common
import eval_linear
from common import print_main
from downstream import search


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--data", default="shapes", help="labelled photos, given as for eval_linear.py")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--val-split", help="split to use (default test for voc07, val2017 for coco, else val)")
    add("--prompt", help='caption for a class (default "a photo of a {}", "a {}" for shapes)')
    search.add_flags(parser, "classify")
    args = parser.parse_args(argv)
    args.val_split = args.val_split or eval_linear.SPLITS.get(args.data, ("train", "val"))[1]
    args.prompt = args.prompt or ("a {}" if args.data == "shapes" else "a photo of a {}")
    if "{}" not in args.prompt:
        parser.error(f'--prompt "{args.prompt}" has no {{}}, where the name of the class goes')
    return args


def main(args):
    model = search.Model(args)
    data = eval_linear.label_data(args.data, args.root, args.val_split)
    names = [re.sub("(?<=[a-z])(?=[A-Z])", " ", name.replace("_", " ")) for name in data.names]
    texts = [args.prompt.replace("{}", name) for name in names]
    print_main(f"{len(texts)} classes, the first: {', '.join(texts[:5])}")
    model.check_texts(texts)
    path = Path(args.output, "classify.png")
    similarity, readable, _ = model.find(texts, data, path)
    print_main(f"the photos nearest to each class are in {path}")

    labels = torch.from_numpy(data.labels[readable])
    scores = eval_linear.score(similarity.T, labels, data.names)
    metric, *_, chance = scores  # the others are of single classes
    score, guess = scores[metric], scores[chance]
    result = {"metric": metric, "zero-shot": score, "guessing": guess, "images": len(readable)}
    common.save(Path(args.output, "result.json"), {"args": vars(args), **result})
    print_main(f"{args.data}, {len(readable)} photos of {len(names)} classes: "
               f"{score:.1f} {metric} by class names, {guess:.1f} by guessing")


if __name__ == "__main__":
    main(get_args())
