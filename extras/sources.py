"""Visual Genome's captions and VOC07's labels"""

import json
import os
import re
from pathlib import Path

import numpy as np

import common
from common import extra, fail, one_line, print_main, progress, read_photos

VOC_TRUTH = {"1": 1, "-1": 0, "0": -1}  # their yes, no and "difficult"


def caption_data(name, root, splits):
    """-> common.CaptionData of each split of --data"""
    if name == "shapes":
        if root:
            fail("--root is for other data than the built-in shapes: give --data, too")
        return [extra("shapes").caption_data(split) for split in splits]
    if name == "vg":
        return read_photos(visual_genome, splits, root or "datasets/vg")
    if os.path.isdir(name):
        return [extra("shards").caption_data(name, split) for split in splits]
    fail(f"no data set {name}: --data is shapes, coco, vg, a .jsonl file or a folder of shards "
         "(for eval_linear.py also voc07 or folder). python tools/to_jsonl.py FILE converts other "
         "files")


def visual_genome(splits, root):
    """Yield (path, captions, no tags) of each photo of a fixed random 103K / 5K split; no names

    Each region's phrase is a caption of its photo. The root holds region_descriptions.json,
    image_data.json, VG_100K/ and VG_100K_2/. Both splits come from one reading.
    """
    for split in splits:
        if split not in ("train", "val"):
            fail(f"--data vg has the splits train and val, not {split}")
    paths = {}
    for row in entries(root, "image_data.json"):
        paths[row["image_id"]] = os.path.join(root, *row["url"].split("/")[-2:])
    ids = np.random.default_rng(0).permutation(sorted(paths)).tolist()
    num_val = min(5000, len(ids) // 10)
    members = {"train": set(ids[num_val:]), "val": set(ids[:num_val])}
    found = {split: [] for split in splits}
    regions = entries(root, "region_descriptions.json")
    for row in progress(regions, desc="captions", total=len(paths), leave=False):
        for split in splits:
            if row["id"] in members[split]:
                captions = [one_line(region["phrase"]) for region in row["regions"]]
                found[split].append((paths[row["id"]], captions, []))
    for split in splits:
        if lost := len(members[split]) - len(found[split]):
            print_main(f"{root}: left out {lost} photos of {split}, which have no regions")
        yield found[split], []


def entries(root, name):
    """The entries of a JSON list, one by one: together, those of 700 MB would take several GB"""
    path = Path(root, name)
    if not path.is_file():
        fail(f"there is no {path}: --root is the folder of Visual Genome's files")
    text, decoder = path.read_text(encoding="utf-8"), json.JSONDecoder()
    between = re.compile(r"[\s,[\]]*")
    end = between.match(text).end()
    while end < len(text):
        entry, end = decoder.raw_decode(text, end)
        yield entry
        end = between.match(text, end).end()


def voc07(root, split):
    """ImageSets/Main/<class>_{split}.txt with lines such as "000012 -1", photos in JPEGImages/

    -> paths (N,), labels (N, classes) int8: 1 yes, 0 no, -1 "difficult"; names of the classes
    """
    folders = [Path(root, inside) for inside in ("", "VOC2007", "VOCdevkit/VOC2007")]
    lists = [path for f in folders for path in sorted(f.glob(f"ImageSets/Main/*_{split}.txt"))]
    if not lists:
        fail(f"{root} has no VOC2007/ImageSets/Main/<class>_{split}.txt: --root is VOCdevkit")
    tables = []  # {photo: 1 yes, 0 no, -1 "difficult"} of each class
    for path in lists:
        lines = [line.rsplit(maxsplit=1) for line in path.read_text().splitlines() if line.strip()]
        tables.append({photo.strip(): VOC_TRUTH[truth] for photo, truth in lines})
    photos = dict.fromkeys(photo for table in tables for photo in table)  # orders may differ
    columns = [[table[photo] for photo in photos] for table in tables]
    paths = [f"{lists[0].parents[2]}/JPEGImages/{photo}.jpg" for photo in photos]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        fail(f"{len(missing)} of {len(paths)} photos are missing, the first is {missing[0]}")
    names = [path.name.removesuffix(f"_{split}.txt") for path in lists]
    return np.array(paths, common.STRINGS), np.array(columns, np.int8).T, names
