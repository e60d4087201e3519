"""Cut the objects out of COCO's photos, as an image folder: "iconic" images  [VirTex App. A.1]

    python tools/crop_coco.py --output datasets/coco-crops      # crops of train2017
    python -m downstream.finetune --data folder --root datasets/coco-crops --weights random \\
        --arch resnet50 --epochs 90 --steps 30 60

Each edge of a box moves outwards by 0 to 30 pixels, at random. Crowds are left out [ours]. Writes
train/<category>/<annotation>.jpg and val/... into --output; existing crops are kept.
"""

import argparse
import multiprocessing
import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--root", default="datasets/coco", help="holds annotations/, train2017/ and val2017/")
    add("--output", default="datasets/coco-crops", help="image folder to write")
    add("--margin", type=common.whole, default=30, help="maximal margin on each edge, in pixels")
    return parser.parse_args(argv)


def main(args):
    for split in "train", "val":
        content = common.read_json(f"{args.root}/annotations/instances_{split}2017.json")
        folders = {}
        for row in content["categories"]:
            folders[row["id"]] = Path(args.output, split, row["name"])
            folders[row["id"]].mkdir(parents=True, exist_ok=True)
        objects = {row["id"]: [] for row in content["images"]}
        for row in content["annotations"]:
            if not row["iscrowd"]:
                file = folders[row["category_id"]] / f"{row['id']}.jpg"
                objects[row["image_id"]].append((row["id"], row["bbox"], file))
        work = []
        for row in content["images"]:
            path = Path(args.root, f"{split}2017", row["file_name"])
            work.append((path, objects[row["id"]]))
        with multiprocessing.Pool() as pool:
            for _ in pool.imap_unordered(partial(crop, args.margin), work, chunksize=16):
                pass


def crop(margin, work):
    """work: a photo and its objects, [(number, box, file of the crop)]"""
    path, objects = work
    photo = Image.open(path).convert("RGB")
    for seed, (x, y, width, height), file in objects:
        rng = random.Random(seed)
        left = x - rng.uniform(0, margin)
        top = y - rng.uniform(0, margin)
        right = x + width + rng.uniform(0, margin)
        bottom = y + height + rng.uniform(0, margin)
        box = np.round([left, top, right, bottom]).astype(int)
        box = np.clip(box, 0, 2 * photo.size)
        box[2:] = np.maximum(box[2:], box[:2] + 1)
        if not file.exists():
            photo.crop(box.tolist()).save(file, quality=95)


if __name__ == "__main__":
    main(get_args())
