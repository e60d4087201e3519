"""Sources of captioned photos beside COCO and a .jsonl, which common.py reads"""

import os

from common import extra, fail, read_photos


def caption_data(name, root, split):
    """One split of --data -> common.CaptionData"""
    if name == "shapes":
        return extra("shapes").caption_data(split)
    if name == "vg":
        return read_photos(extra("visual_genome").photos, split, root or "datasets/vg")
    if os.path.isdir(name):
        return extra("shards").caption_data(name, split)
    fail(f"no data set {name}: --data is shapes, coco, vg, a .jsonl file or a folder of shards; "
         "python tools/to_jsonl.py FILE converts other files")  # fmt: skip
