#!/usr/bin/env bash
# Own annotations in COCO's format often lack "area". pycocotools stops. faster-coco-eval goes on,
# and takes all objects for small ones: AP of small objects is 100, that of medium ones -1, though
# the boxes have 1,200 pixels, which is medium.
# Guess: both stop with a KeyError.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    faster-coco-eval==1.8.0 pycocotools==2.0.11 numpy==2.4.6

cat > expected.txt <<'END'
faster-coco-eval 1.8.0
pycocotools 2.0.11
with areas, pycocotools, AP of small, medium, large: [-1, 100.0, -1]
with areas, faster-coco-eval, AP of small, medium, large: [-1, 100.0, -1]
without areas, pycocotools, AP of small, medium, large: KeyError 'area'
without areas, faster-coco-eval, AP of small, medium, large: [100.0, -1, -1]
END

venv/bin/python - > seen.txt <<'END'
import contextlib
import copy
import io
from importlib.metadata import version

import faster_coco_eval
import pycocotools.coco
import pycocotools.cocoeval

print("faster-coco-eval", version("faster-coco-eval"))
print("pycocotools", version("pycocotools"))
box = [20.0, 30.0, 30.0, 40.0]
row = {"id": 1, "image_id": 1, "category_id": 1, "bbox": box, "area": 1200.0, "iscrowd": 0}
truth = {
    "images": [{"id": 1, "width": 200, "height": 200, "file_name": "1.jpg"}],
    "annotations": [row],
    "categories": [{"id": 1, "name": "dog"}],
}
results = [{"image_id": 1, "category_id": 1, "bbox": box, "score": 0.9}]


def score(coco, evaluation, truth):
    coco.dataset = copy.deepcopy(truth)
    coco.createIndex()
    evaluation = evaluation(coco, coco.loadRes(copy.deepcopy(results)), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return [round(100 * float(value), 1) if value >= 0 else -1 for value in evaluation.stats[3:6]]


packages = {
    "pycocotools": (pycocotools.coco.COCO, pycocotools.cocoeval.COCOeval),
    "faster-coco-eval": (faster_coco_eval.COCO, faster_coco_eval.COCOeval_faster),
}
for area in (True, False):
    if not area:
        del row["area"]
    for package, (coco, evaluation) in packages.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found = score(coco(), evaluation, truth)
        except KeyError as error:
            found = f"KeyError {error}"
        said = "with" if area else "without"
        print(f"{said} areas, {package}, AP of small, medium, large: {found}")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "faster-coco-eval-without-areas: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "faster-coco-eval-without-areas: unchanged"
