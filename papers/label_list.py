"""List the images of an image folder in a .jsonl for tp.py: the class of each is its only tag.

    python papers/label_list.py --root datasets/imagenet --per-class 100
    python papers/label_list.py --root datasets/imagenet --per-class 1000 --classes 100
    python tp.py --data label_list.jsonl --val-split train --labels instances

The first two commands make S-ImageNet with 1K and with 100 classes [ICMLM Sec. 4.2].
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import fail, number, print_main
from eval_linear import label_data


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--root", required=True, help="image folder, with train/<class>/<image>")
    add("--classes", type=number("int > 0"), help="number of classes to draw (default all)")
    add("--per-class", type=number("int > 0"), help="images to draw of each class (default all)")
    add("--seed", type=number("int >= 0"), default=0, help="seed of the draws")
    add("--output", default="label_list.jsonl", help=".jsonl to write")
    return parser.parse_args(argv)


def main(args):
    if not args.output.endswith(".jsonl"):
        fail(f"--output {args.output} must end in .jsonl")
    data = label_data("folder", args.root, "train")
    photos = {name: [] for name in data.names}
    for image, label in zip(data.images, data.labels):
        photos[data.names[label]].append(str(Path(image).resolve()))
    rng, lines = random.Random(args.seed), []
    drawn = sorted(rng.sample(data.names, args.classes or len(data.names)))
    few = [name for name in drawn if len(photos[name]) < (args.per_class or 1)]
    for name in drawn:
        rng.shuffle(photos[name])
        for image in photos[name][: args.per_class]:
            lines.append(json.dumps({"image": image, "tags": [name], "split": "train"}) + "\n")
    Path(args.output).write_text("".join(lines))
    print_main(f"{len(lines)} photos of {len(drawn)} classes")
    if few:
        print_main(f"{len(few)} classes have fewer photos than --per-class, the first: {few[0]}")


if __name__ == "__main__":
    main(get_args())
