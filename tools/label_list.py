"""List the images of an image folder in a .jsonl for tp.py: the class of each is its only tag.

    python tools/label_list.py --root datasets/imagenet --per-class 100
    python tools/label_list.py --root datasets/imagenet --per-class 1000 --classes 100
    python tp.py --data label_list.jsonl --val-split train --labels instances

The first two commands make S-ImageNet with 1K and with 100 classes [ICMLM Sec. 4.2].
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--root", required=True, help="image folder, with train/<class>/<image>")
    add("--classes", type=common.count, help="number of classes to draw (default all)")
    add("--per-class", type=common.count, help="images to draw from each class (default all)")
    add("--seed", type=common.whole, default=0, help="of the draws")
    add("--output", default="label_list.jsonl")
    return parser.parse_args(argv)


def main(args):
    rng = random.Random(args.seed)
    folders = sorted(path for path in Path(args.root, "train").glob("*") if path.is_dir())
    if len(folders) < (args.classes or 1):
        common.fail(f"{args.root}/train holds {len(folders)} folders of classes")
    lines = []
    for folder in sorted(rng.sample(folders, args.classes or len(folders))):
        images = sorted(folder.iterdir())
        rng.shuffle(images)
        for image in images[: args.per_class]:
            row = {"image": str(image.resolve()), "tags": [folder.name], "split": "train"}
            lines.append(json.dumps(row) + "\n")
    Path(args.output).write_text("".join(lines))


if __name__ == "__main__":
    main(get_args())
