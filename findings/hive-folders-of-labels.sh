#!/usr/bin/env bash
# Photos in folders label=01 and label=10, as pyarrow, Spark and polars partition a data set. The
# label is 1 for pyarrow and polars, the text "01" for DuckDB, and missing for datasets and for
# polars given a pattern of files instead of the folder.
# Guess: all readers give a number; the leading zero is lost everywhere.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    pyarrow==26.0.1 polars==2.1.0 duckdb==2.0.1 datasets==5.2.0 pandas==3.1.1 numpy==2.4.6
export HF_HOME=$folder/hf HF_HUB_OFFLINE=1

cat > expected.txt <<'END'
pyarrow 26.0.1
polars 2.1.0
duckdb 2.0.1
datasets 5.2.0
pyarrow: [{'image': 'a.jpg', 'label': 1}, {'image': 'a.jpg', 'label': 10}]
polars, folder: [{'image': 'a.jpg', 'label': 1}, {'image': 'a.jpg', 'label': 10}]
polars, pattern: [{'image': 'a.jpg'}, {'image': 'a.jpg'}]
duckdb: [{'image': 'a.jpg', 'label': '01'}, {'image': 'a.jpg', 'label': '10'}]
datasets: [{'image': 'a.jpg'}, {'image': 'a.jpg'}]
END

venv/bin/python - > seen.txt <<'END'
from importlib.metadata import version
from pathlib import Path

import datasets
import duckdb
import polars
import pyarrow
import pyarrow.dataset
import pyarrow.parquet

for package in ("pyarrow", "polars", "duckdb", "datasets"):
    print(package, version(package))
datasets.disable_progress_bars()
for label in ("01", "10"):
    folder = Path("photos", f"label={label}")
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"image": ["a.jpg"]}), folder / "part.parquet")
pattern = "photos/*/*.parquet"
by_pyarrow = pyarrow.dataset.dataset("photos", partitioning="hive").to_table()
by_duckdb = duckdb.sql(f"select * from '{pattern}' order by label")
by_datasets = datasets.load_dataset("parquet", data_dir="photos", split="train")
print("pyarrow:", by_pyarrow.to_pylist())
print("polars, folder:", polars.read_parquet("photos").to_dicts())
print("polars, pattern:", polars.read_parquet(pattern).to_dicts())
print("duckdb:", [dict(zip(by_duckdb.columns, row)) for row in by_duckdb.fetchall()])
print("datasets:", by_datasets.to_list())
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "hive-folders-of-labels: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "hive-folders-of-labels: unchanged"
