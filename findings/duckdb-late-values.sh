#!/usr/bin/env bash
# Photos as JSON lines, of which the last hundred have a split (or tags, or a caption), the others
# null. If the first 20,480 lines are null, DuckDB gives the column the type NULL and returns null
# for all of its values, without a message.
# Guess: the values are there, as in pandas and pyarrow, or DuckDB stops with an error.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    duckdb==2.0.1

cat > expected.txt <<'END'
duckdb 2.0.1
20000 nulls: 100 of 100 values in 20100 rows, type VARCHAR
20000 nulls, sample_size = -1: 100 of 100 values in 20100 rows, type VARCHAR
20480 nulls: 0 of 100 values in 20580 rows, type "NULL"
20480 nulls, sample_size = -1: 100 of 100 values in 20580 rows, type VARCHAR
END

venv/bin/python - > seen.txt <<'END'
import json
from importlib.metadata import version

import duckdb

print("duckdb", version("duckdb"))


def write(path, nulls):
    with open(path, "w") as file:
        for i in range(nulls + 100):
            split = "val" if i >= nulls else None
            file.write(json.dumps({"image": f"{i}.jpg", "split": split}) + "\n")


for nulls in (20_000, 20_480):
    write("photos.jsonl", nulls)
    for option in ("", ", sample_size = -1"):
        source = f"read_json('photos.jsonl'{option})"
        kind = duckdb.sql(f"describe select split from {source}").fetchall()[0][1]
        rows, found = duckdb.sql(f"select count(*), count(split) from {source}").fetchall()[0]
        print(f"{nulls} nulls{option}: {found} of 100 values in {rows} rows, type {kind}")
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "duckdb-late-values: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "duckdb-late-values: unchanged"
