#!/usr/bin/env bash
# COCO's crowds (iscrowd 1), which are neither learned nor counted as missed, through sahi, which
# cuts large photos into tiles: they come out as ordinary objects (iscrowd 0), without a message
# if they are polygons. Run lengths, COCO's own form of crowds, are dropped with a warning, and
# the box stays as an object.
# Guess: iscrowd stays 1, and the mask stays.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    sahi==0.12.8 numpy==2.4.6 pillow==13.0.0

cat > expected.txt <<'END'
sahi 0.12.8
a crowd as polygon, read: iscrowd, mask [(0, 'mask')]
a crowd as polygon, cut into tiles: iscrowd, mask [(0, 'mask')]
a crowd as run lengths, read: iscrowd, mask [(0, 'no mask')]
a crowd as run lengths, cut into tiles: iscrowd, mask [(0, 'mask')]
END

venv/bin/python - > seen.txt <<'END'
import json
import logging
from importlib.metadata import version
from pathlib import Path

from PIL import Image
from sahi.slicing import slice_coco
from sahi.utils.coco import Coco

print("sahi", version("sahi"))
logging.disable(logging.WARNING)
Path("photos").mkdir()
Image.new("RGB", (400, 200)).save("photos/1.jpg")
polygon = [[30, 20, 90, 20, 90, 60, 30, 60]]
rest = 400 * 200 - 30 * 200 - 59 * 200 - 60
runs = {"size": [200, 400], "counts": [30 * 200 + 20, *[40, 160] * 59, 40, rest]}
for kind, mask in (("polygon", polygon), ("run lengths", runs)):
    row = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [30, 20, 60, 40], "area": 2400}
    image = {"id": 1, "width": 400, "height": 200, "file_name": "1.jpg"}
    content = {
        "images": [image],
        "annotations": [row | {"iscrowd": 1, "segmentation": mask}],
        "categories": [{"id": 1, "name": "person"}],
    }
    Path("crowd.json").write_text(json.dumps(content))
    read = Coco.from_coco_dict_or_path("crowd.json").json["annotations"]
    tiles, _ = slice_coco(
        "crowd.json", "photos", "tiles", output_dir="out", slice_height=200, slice_width=200,
        overlap_height_ratio=0, overlap_width_ratio=0,
    )
    for what, rows in (("read", read), ("cut into tiles", tiles["annotations"])):
        found = [(row["iscrowd"], "mask" if row["segmentation"] else "no mask") for row in rows]
        print(f"a crowd as {kind}, {what}: iscrowd, mask {found}")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "sahi-crowds: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "sahi-crowds: unchanged"
