#!/usr/bin/env bash
# CVAT's boxes can be turned, too. Datumaro, the library behind CVAT's exports, reads such a box
# from CVAT's XML, but writes neither it nor a box around it to COCO, VOC and YOLO: the object is
# gone, without a message.
# Guess: all three get the upright box around the turned one.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    datumaro==1.13.12 numpy==2.4.6 pillow==12.3.0

cat > expected.txt <<'END'
datumaro 1.13.12
read: ['Bbox', 'RotatedBbox']
COCO: boxes [[10.0, 40.0, 40.0, 20.0]]
VOC: objects 1
YOLO: lines 1
END

venv/bin/python - > seen.txt <<'END'
import json
from importlib.metadata import version
from pathlib import Path

import datumaro
from PIL import Image

print("datumaro", version("datumaro"))
Path("cvat/images").mkdir(parents=True)
Image.new("RGB", (200, 100)).save("cvat/images/1.jpg")
box = '<box label="ship" occluded="0" xtl="{}" ytl="40" xbr="{}" ybr="60" {} z_order="0"/>'
Path("cvat/annotations.xml").write_text(f"""<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version>
<meta><task><labels><label><name>ship</name><attributes/></label></labels></task></meta>
<image id="0" name="1.jpg" width="200" height="100">
{box.format(10, 50, "")}{box.format(60, 140, 'rotation="30.0"')}
</image></annotations>""")
data = datumaro.Dataset.import_from("cvat", "cvat")
print("read:", [type(found).__name__ for item in data for found in item.annotations])
for name in ("coco_instances", "voc", "yolo"):
    data.export(name, name, save_media=True)
coco = json.loads(next(Path("coco_instances/annotations").glob("*.json")).read_text())
print("COCO: boxes", [row["bbox"] for row in coco["annotations"]])
voc = Path("voc/Annotations/1.xml").read_text()
print("VOC: objects", voc.count("<object>"))
lines = [path.read_text() for path in Path("yolo").rglob("1.txt")]
print("YOLO: lines", len("".join(lines).splitlines()))
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "datumaro-turned-box: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "datumaro-turned-box: unchanged"
