#!/usr/bin/env bash
# Photo names such as tile_x0041_y0020.png in a spreadsheet. In .xlsx, _x0041_ stands for the
# character with that number, "A". openpyxl neither escapes nor unescapes it, calamine (and with
# it polars, and pandas with engine="calamine") does: names that one library wrote are others to
# the next, and no photo is found by them. pandas warns that calamine will be its default.
# Guess: every reader gives back the names that every writer wrote.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -qq --disable-pip-version-check \
    openpyxl==3.1.5 xlsxwriter==3.3.1 python-calamine==0.9.1 pandas==3.1.1 numpy==2.4.6

cat > expected.txt <<'END'
openpyxl 3.1.5
xlsxwriter 3.3.1
python-calamine 0.9.1
pandas 3.1.1
openpyxl, read by openpyxl: as written
openpyxl, read by calamine: ['tile\x10y0020.png', 'tileAy0020.png']
openpyxl, read by pandas with openpyxl: as written
openpyxl, read by pandas with calamine: ['tile\x10y0020.png', 'tileAy0020.png']
xlsxwriter, read by openpyxl: as written
xlsxwriter, read by calamine: as written
xlsxwriter, read by pandas with openpyxl: as written
xlsxwriter, read by pandas with calamine: as written
END

venv/bin/python - > seen.txt <<'END'
import warnings
from importlib.metadata import version

import openpyxl
import pandas
import python_calamine
import xlsxwriter

for package in ("openpyxl", "xlsxwriter", "python-calamine", "pandas"):
    print(package, version(package))
names = ["tile_x0010_y0020.png", "tile_x0041_y0020.png"]

book = openpyxl.Workbook()
for row in [["image"], *([name] for name in names)]:
    book.active.append(row)
book.save("openpyxl.xlsx")

book = xlsxwriter.Workbook("xlsxwriter.xlsx")
book.add_worksheet().write_column(0, 0, ["image", *names])
book.close()


def by_openpyxl(path):
    return [cell.value for cell in openpyxl.load_workbook(path).active["A"]][1:]


def by_calamine(path):
    rows = python_calamine.CalamineWorkbook.from_path(path).get_sheet_by_index(0).to_python()
    return [row[0] for row in rows][1:]


def by_pandas(engine):
    return lambda path: pandas.read_excel(path, engine=engine)["image"].tolist()


readers = {
    "openpyxl": by_openpyxl,
    "calamine": by_calamine,
    "pandas with openpyxl": by_pandas("openpyxl"),
    "pandas with calamine": by_pandas("calamine"),
}
for writer in ("openpyxl", "xlsxwriter"):
    for reader, read in readers.items():
        found = read(f"{writer}.xlsx")
        print(f"{writer}, read by {reader}:", "as written" if found == names else found)
END

cat seen.txt
if ! diff expected.txt seen.txt; then
    echo "xlsx-names-of-tiles: CHANGED (< recorded, > seen now)"
    exit 1
fi
echo "xlsx-names-of-tiles: unchanged"
