"""VOC07, --data voc07 of eval_linear.py: photos with one or more of twenty classes."""

import os
from pathlib import Path

import numpy as np

import common
from common import fail

TRUTH = {"1": 1, "-1": 0, "0": -1}  # their yes, no and "difficult"


def labels(root, split):
    """ImageSets/Main/<class>_{split}.txt, photos in JPEGImages/

    -> paths (N,), labels (N, classes) int8: 1 yes, 0 no, -1 "difficult"; names of the classes
    """
    folders = [Path(root, inside) for inside in ("", "VOC2007", "VOCdevkit/VOC2007")]
    lists = [path for f in folders for path in sorted(f.glob(f"ImageSets/Main/*_{split}.txt"))]
    if not lists:
        fail(f"{root} has no VOC2007/ImageSets/Main/<class>_{split}.txt: --root is VOCdevkit")
    tables = [dict(np.loadtxt(path, str, ndmin=2)) for path in lists]  # {photo: "1", "-1" or "0"}
    ids, columns = list(tables[0]), []
    for path, table in zip(lists, tables):
        if table.keys() != tables[0].keys():
            fail(f"{path} does not list the same photos as {lists[0].name}")
        columns.append([TRUTH[table[photo]] for photo in ids])  # the lists' orders may differ
    photos = lists[0].parents[2] / "JPEGImages"
    paths = [f"{photos}/{photo}.jpg" for photo in ids]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        fail(f"{len(missing)} of {len(paths)} photos are missing, the first is {missing[0]}")
    names = [path.name.removesuffix(f"_{split}.txt") for path in lists]
    return np.array(paths, common.STRINGS), np.array(columns, np.int8).T, names
