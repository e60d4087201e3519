"""Cut the objects out of COCO's photos, as an image folder: "iconic" images  [VirTex App. A.1]

    python tools/crop_coco.py --output datasets/coco-crops      # crops of train2017
    python -m downstream.finetune --data folder --root datasets/coco-crops --weights random \\
        --arch resnet50 --epochs 90 --steps 30 60

Each edge of a box moves outwards by 0 to 30 pixels, at random. Crowds are left out [ours]. Writes
train/<category>/<annotation>.jpg and val/... into --output; existing crops are kept.
"""

import argparse
import multiprocessing
import os
import random
import sys
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import fail, make_folder, print_main, progress


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--root", default="datasets/coco", help="holds annotations/, train2017/ and val2017/")
    add("--output", default="datasets/coco-crops", help="image folder to write")
    add("--margin", type=common.whole, default=30, help="maximal margin on each edge, in pixels")
    return parser.parse_args(argv)


def main(args):
    make_folder(args.output)
    for split in "train", "val":
        path = f"{args.root}/annotations/instances_{split}2017.json"
        if not Path(path).is_file():
            fail(f"there is no {path}: --root is the folder of COCO, which has annotations/")
        content = common.read_json(path)
        names = {row["id"]: row["name"] for row in content["categories"]}
        photos = f"{args.root}/{split}2017"
        files = {row["id"]: f"{photos}/{row['file_name']}" for row in content["images"]}
        objects, counts = defaultdict(list), Counter()
        for row in content["annotations"]:
            if row["iscrowd"]:
                counts["crowds left out"] += 1
            elif row["image_id"] not in files or row["category_id"] not in names:
                counts["objects left out, whose photo or category is not listed"] += 1
            else:
                folder = f"{args.output}/{split}/{names[row['category_id']]}"
                make_folder(folder)
                crop_file = f"{folder}/{row['id']}.jpg"
                objects[files[row["image_id"]]].append((row["id"], row["bbox"], crop_file))
        if missing := [path for path in objects if not os.path.isfile(path)]:
            fail(f"{len(missing)} of {len(objects)} photos are missing, the first is {missing[0]}")
        with multiprocessing.Pool() as pool:
            done = pool.imap_unordered(partial(crop, args.margin), objects.items(), chunksize=16)
            for found in progress(done, desc=split, total=len(objects), unit=" photos"):
                counts.update(found)
        print_main("\n".join(f"{split}: {count} {what}" for what, count in counts.items()))


def crop(margin, work):
    """work: a photo, its objects [(number, box, file of the crop)] -> {what was done: how often}"""
    path, objects = work
    counts = Counter()
    try:
        photo = Image.open(path).convert("RGB")
    except OSError as error:  # of Pillow: cut off, or no photo
        print_main(f"cannot decode {path} ({error})")
        return {"objects left out, whose photo cannot be decoded": len(objects)}
    for seed, (x, y, width, height), file in objects:
        rng = random.Random(seed)
        left, top = x - rng.uniform(0, margin), y - rng.uniform(0, margin)
        right, bottom = x + width + rng.uniform(0, margin), y + height + rng.uniform(0, margin)
        box = np.clip(np.round([left, top, right, bottom]).astype(int), 0, 2 * photo.size)
        box[2:] = np.maximum(box[2:], box[:2] + 1)
        if os.path.exists(file):
            counts["crops kept from an earlier call"] += 1
        else:
            photo.crop(box.tolist()).save(file, quality=95)
            counts["crops written"] += 1
    return counts


if __name__ == "__main__":
    main(get_args())
