#!/usr/bin/env bash
# A folder of photos with metadata.jsonl, read by datasets' imagefolder. If one photo's name has
# the word train between hyphens (red-train-3.jpg), that photo becomes the split "train", and the
# other photos and all captions are gone, without a message.
# Guess: all photos are loaded with their captions, whatever they are called.
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
with red-bus-3.jpg: train has 3 photos, columns ['image', 'caption']
with red-train-3.jpg: train has 1 photos, columns ['image']
END

venv/bin/python - > seen.txt <<'END'
import json
from importlib.metadata import version
from pathlib import Path

import datasets
from PIL import Image

print("datasets", version("datasets"))
datasets.disable_progress_bars()
for third in ("red-bus-3", "red-train-3"):
    folder = Path(third)
    folder.mkdir()
    lines = []
    for name in ("a dog", "a cat", third):
        Image.new("RGB", (8, 8)).save(folder / f"{name}.jpg")
        lines.append(json.dumps({"file_name": f"{name}.jpg", "caption": f"photo of {name}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    loaded = datasets.load_dataset("imagefolder", data_dir=str(folder))
    for split, rows in loaded.items():
        print(f"with {third}.jpg: {split} has {len(rows)} photos, columns {rows.column_names}")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "imagefolder-train-in-a-name: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "imagefolder-train-in-a-name: unchanged"
