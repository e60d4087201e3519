#!/usr/bin/env bash
# Label Studio's rectangles can be turned. Of one that is turned by 30 degrees, on a photo of 200
# x 100 pixels, its converter writes a wrong box to COCO (turned in percents, as if the photo were
# square) and the box before turning to VOC and YOLO; nothing is said.
# Guess: all three get the upright box around the turned rectangle.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    label-studio-sdk==2.1.2 pillow==13.0.0

cat > expected.txt <<'END'
label-studio-sdk 2.1.2
x, y, width, height around the turned rectangle: [70.0, 20.0, 62.0, 47.3]
COCO: [60.0, 20.0, 72.0, 32.3]
VOC: [80, 20, 60, 20]
YOLO: [80.0, 20.0, 60.0, 20.0]
END

venv/bin/python - > seen.txt <<'END'
import json
import math
import re
from importlib.metadata import version
from pathlib import Path

from label_studio_sdk.converter import Converter
from PIL import Image

print("label-studio-sdk", version("label-studio-sdk"))
Image.new("RGB", (200, 100)).save("1.jpg")
config = """<View><Image name="image" value="$image"/>
<RectangleLabels name="label" toName="image"><Label value="ship"/></RectangleLabels></View>"""
value = {"x": 40, "y": 20, "width": 30, "height": 20, "rotation": 30, "rectanglelabels": ["ship"]}
box = {
    "id": "a", "type": "rectanglelabels", "from_name": "label", "to_name": "image",
    "original_width": 200, "original_height": 100, "image_rotation": 0, "value": value,
}
annotation = {"id": 1, "result": [box], "was_cancelled": False}
task = {"id": 1, "data": {"image": str(Path("1.jpg").resolve())}, "annotations": [annotation]}
Path("export.json").write_text(json.dumps([task]))
converter = Converter(config=config, project_dir=".", download_resources=False)
converter.convert_to_coco("export.json", "coco", is_dir=False)
converter.convert_to_voc("export.json", "voc", is_dir=False)
converter.convert_to_yolo("export.json", "yolo", is_dir=False)

cos, sin = math.cos(math.radians(30)), math.sin(math.radians(30))  # about the upper left corner
corners = [(0, 0), (60, 0), (60, 20), (0, 20)]
xs = [80 + x * cos - y * sin for x, y in corners]
ys = [20 + x * sin + y * cos for x, y in corners]
around = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
print("x, y, width, height around the turned rectangle:", [round(v, 1) for v in around])

found = json.loads(Path("coco/result.json").read_text())["annotations"][0]["bbox"]
print("COCO:", [round(v, 1) for v in found])
edges = re.findall(r"<[xy]m..>(\d+)<", Path("voc/Annotations/1.xml").read_text())
left, top, right, bottom = map(int, edges)
print("VOC:", [left, top, right - left, bottom - top])
_, x, y, w, h = map(float, Path("yolo/labels/1.txt").read_text().split())
yolo = [200 * (x - w / 2), 100 * (y - h / 2), 200 * w, 100 * h]
print("YOLO:", [round(v, 1) for v in yolo])
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "label-studio-turned-box: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "label-studio-turned-box: unchanged"
