"""Cut the objects out of COCO's photos, as an image folder: "iconic" images  [VirTex App. A.1]

    python papers/crop_coco.py --output datasets/coco-crops      # crops of train2017
    python -m downstream.finetune --data folder --root datasets/coco-crops --weights random \\
        --arch resnet50 --epochs 90 --steps 30 60

Each edge of a box moves outwards by 0 to 30 pixels, at random. Crowds are left out [ours]. Writes
train/<category>/<number of the annotation>.jpg and val/... into --output.
"""

import os
import random
import sys
from functools import partial
from multiprocessing import Pool
from pathlib import Path

from PIL import ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import number
from downstream import boxes


def get_args(argv=None):
    parser = common.Parser(__doc__)
    add = parser.add_argument
    add("--root", default="datasets/coco", help="holds annotations/, train2017/ and val2017/")
    add("--output", default="datasets/coco-crops", help="image folder to write")
    add("--margin", type=number("int >= 0"), default=30, help="pixels an edge may move by")
    return parser.parse_args(argv)


def main(args):
    common.make_folder(args.output)
    for split in "train", "val":
        data = boxes.load("coco", args.root, f"{split}2017")
        work = {image: [] for image in data.ids}  # {id of a photo: [(box, file of the crop)]}
        for row in data.content["annotations"]:
            if not row["iscrowd"]:
                folder = f"{args.output}/{split}/{data.categories[row['category_id']]}"
                os.makedirs(folder, exist_ok=True)
                work[row["image_id"]].append((row["bbox"], f"{folder}/{row['id']}.jpg"))
        with Pool() as pool:
            pairs = [pair for pair in zip(data.images.tolist(), work.values()) if pair[1]]
            done = pool.imap_unordered(partial(crop, args.margin), pairs, chunksize=16)
            done = sum(common.progress(done, desc=split, total=len(pairs), unit=" photos"))
        common.print_main(f"{split}: {done} crops written")


def crop(margin, work):
    """work: path of a photo, its objects [(box, file of the crop)] -> number of crops"""
    path, objects = work
    try:
        photo = ImageOps.exif_transpose(common.to_rgb(common.open_photo(path)))
    except Exception as error:  # PIL's decoders raise a dozen kinds
        common.print_main(f"cannot decode {path} ({error}): {len(objects)} objects are left out")
        return 0
    for (x, y, width, height), file in objects:
        rng = random.Random(Path(file).stem)
        left = max(0, round(x - rng.uniform(0, margin)))
        top = max(0, round(y - rng.uniform(0, margin)))
        right = min(photo.width, round(x + width + rng.uniform(0, margin)))
        bottom = min(photo.height, round(y + height + rng.uniform(0, margin)))
        box = left, top, max(right, left + 1), max(bottom, top + 1)
        photo.crop(box).save(file, quality=95)
    return len(objects)


if __name__ == "__main__":
    main(get_args())
