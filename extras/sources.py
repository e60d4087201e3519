"""Sources of captioned photos beside COCO and a .jsonl, which common.py reads"""

import os
from functools import partial

from common import extra, fail, read_photos


def caption_data(name, root, split):
    """One split of --data -> common.CaptionData"""
    if name == "shapes":
        return extra("shapes").caption_data(split)
    if name == "vg":
        photos = extra("visual_genome").photos
        return read_photos(split, partial(photos, root or "datasets/vg", split))
    if os.path.isdir(name):
        return extra("shards").caption_data(name, split)
    fail(f"no data set {name}: --data is shapes, coco, vg, a .jsonl file or a folder of shards; "
         "python tools/to_jsonl.py FILE converts other files")  # fmt: skip
