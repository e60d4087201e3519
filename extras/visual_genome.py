"""Visual Genome, --data vg: each region's phrase is a caption of its photo.

--root holds region_descriptions.json, image_data.json, VG_100K/ and VG_100K_2/.
"""

import os

import ijson  # reads the lists of up to 700 MB entry by entry
import numpy as np

from common import fail, one_line, print_main, progress


def photos(split, root):
    """-> (path, captions, no tags) of each photo of a fixed random 103K / 5K split; no names"""
    if split not in ("train", "val"):
        fail(f"--data vg has the splits train and val, not {split}")
    paths = {}
    for row in entries(root, "image_data.json"):
        paths[row["image_id"]] = os.path.join(root, *row["url"].split("/")[-2:])
    ids = np.random.default_rng(0).permutation(sorted(paths)).tolist()
    num_val = min(5000, len(ids) // 10)
    keep = set(ids[:num_val] if split == "val" else ids[num_val:])
    rows = progress(
        entries(root, "region_descriptions.json"), desc="captions", total=len(paths), leave=False
    )
    found = []
    for row in rows:
        if row["id"] in keep:
            captions = [one_line(region["phrase"]) for region in row["regions"]]
            found.append((paths[row["id"]], captions, []))
    if lost := len(keep) - len(found):
        print_main(f"{root}: left out {lost} photos of {split}, which have no regions")
    return found, []


def entries(root, name):
    path = os.path.join(root, name)
    if not os.path.isfile(path):
        fail(f"there is no {path}: --root is the folder of Visual Genome's files")
    with open(path, "rb") as file:
        yield from ijson.items(file, "item")
