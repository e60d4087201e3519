#!/usr/bin/env bash
# datasets' imagefolder on class folders with a metadata.jsonl of captions, which lacks a row for
# one photo: that photo is left out, and so are the class labels, without a message.
# Guess: the photo comes with the caption None, and the label beside the caption.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 numpy==2.4.6 pillow==13.0.0
export HF_HOME=$folder/hf HF_HUB_OFFLINE=1

cat > expected.txt <<'END'
datasets 5.2.0
without metadata.jsonl: 3 of 3 photos, columns ['image', 'label']
with two captions: 2 of 3 photos, columns ['image', 'caption']
END

venv/bin/python - > seen.txt <<'END'
import json
from importlib.metadata import version
from pathlib import Path

import datasets
from PIL import Image

print("datasets", version("datasets"))
datasets.disable_progress_bars()
names = ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"]
for name in names:
    Path("photos", name).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(Path("photos", name))


def show(when):
    rows = datasets.load_dataset("imagefolder", data_dir="photos", split="train")
    print(f"{when}: {len(rows)} of 3 photos, columns {rows.column_names}")


show("without metadata.jsonl")
lines = [json.dumps({"file_name": name, "caption": "a pet"}) for name in names]
Path("photos", "metadata.jsonl").write_text("\n".join(lines[:2]))
show("with two captions")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "imagefolder-photos-without-a-row: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "imagefolder-photos-without-a-row: unchanged"
