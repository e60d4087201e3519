#!/usr/bin/env bash
# A photo that two people annotated in Label Studio. Its converter lists the photo twice in COCO's
# file, under two ids with the boxes of one annotator each, so half of the objects are background
# in each copy; VOC's and YOLO's files hold the boxes of the last annotator only; nothing is said.
# Guess: COCO has the photo once, with the boxes of both; so have VOC and YOLO.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    label-studio-sdk==2.1.2 pillow==13.0.0

cat > expected.txt <<'END'
label-studio-sdk 2.1.2
COCO: image 0 is 1.jpg, with ['ship']
COCO: image 1 is 1.jpg, with ['car']
VOC: ['car']
YOLO: ['car']
END

venv/bin/python - > seen.txt <<'END'
import json
from importlib.metadata import version
from pathlib import Path

from label_studio_sdk.converter import Converter
from PIL import Image

print("label-studio-sdk", version("label-studio-sdk"))
Image.new("RGB", (200, 100)).save("1.jpg")
config = """<View><Image name="image" value="$image"/>
<RectangleLabels name="label" toName="image"><Label value="ship"/><Label value="car"/>
</RectangleLabels></View>"""


def annotation(number, label, left):
    value = {"x": left, "y": 20, "width": 20, "height": 20, "rotation": 0}
    box = {
        "id": label, "type": "rectanglelabels", "from_name": "label", "to_name": "image",
        "original_width": 200, "original_height": 100, "image_rotation": 0,
        "value": value | {"rectanglelabels": [label]},
    }
    return {"id": number, "completed_by": number, "result": [box], "was_cancelled": False}


both = [annotation(1, "ship", 10), annotation(2, "car", 60)]
task = {"id": 1, "data": {"image": str(Path("1.jpg").resolve())}, "annotations": both}
Path("export.json").write_text(json.dumps([task]))
converter = Converter(config=config, project_dir=".", download_resources=False)
converter.convert_to_coco("export.json", "coco", is_dir=False)
converter.convert_to_voc("export.json", "voc", is_dir=False)
converter.convert_to_yolo("export.json", "yolo", is_dir=False)

coco = json.loads(Path("coco/result.json").read_text())
names = {category["id"]: category["name"] for category in coco["categories"]}
for image in coco["images"]:
    own = [row for row in coco["annotations"] if row["image_id"] == image["id"]]
    labels = [names[row["category_id"]] for row in own]
    print(f"COCO: image {image['id']} is {Path(image['file_name']).name}, with {labels}")
voc = Path("voc/Annotations/1.xml").read_text()
print("VOC:", [name for name in ("ship", "car") if f"<name>{name}</name>" in voc])
classes = Path("yolo/classes.txt").read_text().split()
lines = Path("yolo/labels/1.txt").read_text().splitlines()
print("YOLO:", [classes[int(line.split()[0])] for line in lines])
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "label-studio-two-annotators: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "label-studio-two-annotators: unchanged"
