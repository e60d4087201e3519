#!/usr/bin/env bash
# datasets' ClassLabel with classes that are called by numbers, as those of Flowers-102 are ("1"
# to "102"). A text that is no class is refused, unless it can be read as an index: "0" is taken
# for the first class, which is "1". Numbers instead of texts are indices at once, one off.
# Guess: "0" is refused, as "4" is.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 numpy==2.4.6
export HF_HOME=$folder/hf HF_HUB_OFFLINE=1

cat > expected.txt <<'END'
datasets 5.2.0
['1', '2'] -> ['1', '2']
['0', '1'] -> ['1', '1']
['4'] -> Invalid string class label 4
[1, 2] -> ['2', '3']
END

venv/bin/python - > seen.txt <<'END'
from importlib.metadata import version

from datasets import ClassLabel, Dataset, disable_progress_bars

print("datasets", version("datasets"))
disable_progress_bars()
classes = ClassLabel(names=["1", "2", "3"])
for column in (["1", "2"], ["0", "1"], ["4"], [1, 2]):
    rows = Dataset.from_dict({"label": column})
    try:
        labels = rows.cast_column("label", classes)["label"]
        print(column, "->", [classes.int2str(label) for label in labels])
    except ValueError as error:
        print(column, "->", error)
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "class-label-of-an-unknown-number: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "class-label-of-an-unknown-number: unchanged"
