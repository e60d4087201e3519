#!/usr/bin/env bash
# A table with a list of captions for each photo becomes one row a caption. Photos without a
# caption (an empty list, or null) stay in pandas, vanish in DuckDB, and in polars it depends on
# which of the two they have: null stays, an empty list vanishes.
# Guess: pandas and polars keep both, DuckDB drops both.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    pandas==3.1.1 polars==2.1.0 duckdb==2.0.1 pyarrow==26.0.1 numpy==2.4.6

cat > expected.txt <<'END'
pandas 3.1.1
polars 2.1.0
duckdb 2.0.1
pandas: ['two', 'two', 'empty', 'null']
polars: ['two', 'two', 'null']
duckdb: ['two', 'two']
END

venv/bin/python - > seen.txt <<'END'
from importlib.metadata import version

import duckdb
import polars
import pyarrow

for package in ("pandas", "polars", "duckdb"):
    print(package, version(package))
captions = pyarrow.array([["a", "b"], [], None], pyarrow.list_(pyarrow.string()))
photos = pyarrow.table({"image": ["two", "empty", "null"], "captions": captions})
print("pandas:", photos.to_pandas().explode("captions")["image"].tolist())
print("polars:", polars.from_arrow(photos).explode("captions")["image"].to_list())
rows = duckdb.sql("select image, unnest(captions) from photos").fetchall()
print("duckdb:", [row[0] for row in rows])
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "explode-without-captions: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "explode-without-captions: unchanged"
