"""Caption files of other projects, for tools/to_jsonl.py: from files to rows.

A row is {name of a column: value}, whatever the names; to_jsonl.py decides what they mean.
"""

import ast
import csv
import html
import io
import json
import os
import re
import shlex
import unicodedata
from collections import defaultdict
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path

import regex
from PIL import Image

import common
from common import fail

SPLITS = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
TABLES = "parquet", "jsonl", "json", "csv", "tsv"  # what a folder may hold, the best first
ENDING = re.compile(r"(?i)\.(jpe?g|png|webp|gif|bmp|tiff?)$")
HIDDEN = re.compile(r"(^|/)\.")  # of macOS, say: ._1.jpg
ENTITY = re.compile(r"&#?\w+;")
HTML_TAG = re.compile(r"(?i)</?(?:p|br|b|i|u|em|strong|div|span|a|ul|ol|li|font|h\d)\b[^<>]*>")
INVISIBLE = regex.compile(r"[\p{Cs}\u115f\u1160\u2800\u3164\uffa0]")  # \p{Cs}: half emojis
LIGATURE = re.compile("[\ufb00-\ufb06]")
LINE = re.compile(r"(?i)(\S.*\.(jpe?g|png)(#\d+)?|ROCO\w*)\t")  # of token.txt: it has no header


def read_rows(path, photo_folder, check):
    """The rows of a file, or of a folder of KEY.txt -> rows, {column: as the file spells it}

    photo_folder: for the photos in a .parquet, after check(columns)
    """
    if path.is_dir():
        rows = folder_rows(path)
    elif path.suffix == ".parquet":
        rows = parquet_rows(path, photo_folder, check)
    elif (text := decode(path)).lstrip().startswith(("{", "[")):
        rows = json_rows(parse_json(path, text))
    elif LINE.match(text):  # here quotes are only characters
        lines = re.findall(r"(.+?)(?:#\d+)?\t(.*)", text)
        rows = [{"image": photo, "caption": caption} for photo, caption in lines]
    else:
        rows = table_rows(path, text)
    bad = [row for row in rows if not isinstance(row, dict) or None in row]
    if bad or not rows:
        fail(f"{path} needs rows with a name for each cell (commas in captions need quotes), but "
             f"has {short(bad[:1])}")  # fmt: skip
    spelling = {column_name(key): key for row in rows for key in row}
    return [{column_name(key): value for key, value in row.items()} for row in rows], spelling


def column_name(text):
    """Lower case, with _ for spaces and dashes"""
    return re.sub(r"\W+", "_", text.strip().lower())


def short(value):
    return common.one_line(str(value))[:150]


def clean(text):
    """Without HTML's tags and entities, ligatures, what is invisible, half an emoji"""
    for _ in range(2):  # the web's are often escaped twice
        text = ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    text = HTML_TAG.sub(" ", text)
    text = LIGATURE.sub(lambda letters: unicodedata.normalize("NFKC", letters[0]), text)
    return common.one_line(INVISIBLE.sub("", text))


def parse_list(text):
    """A list or dictionary as JSON, Python or numpy writes it -> that; anything else as it is"""
    if text[:1] + text[-1:] not in ("[]", "{}"):
        return text
    commas = re.sub(r"(?<=['\"])\s+(?=['\"])", ", ", text)  # numpy writes none
    with suppress(ValueError, SyntaxError):
        return json.loads(text)
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(commas)
    return text


def split_in(words):
    """-> train, val or test, or None if none of the words stands for one"""
    words = [re.sub(r"\d", "", word.lower()) for word in words]  # train2017
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def decode(path):
    """-> the text of a file in UTF-8, or in UTF-16 with a byte order mark"""
    if not path.is_file():
        fail(f"there is no {path}")
    content = path.read_bytes()
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in content and not wide:
        fail(f"{path} is no text: give .json, .jsonl, .csv, .tsv, .txt or .parquet. A spreadsheet "
             "can be saved as .csv, tar files go to tools/make_shards.py")  # fmt: skip
    try:
        return content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{path} is not UTF-8 (byte {error.start}). Convert it, for example from CP1252: "
             f"iconv -f CP1252 -t UTF-8 {shlex.quote(str(path))} > NEW_FILE")  # fmt: skip


def folder_rows(folder):
    """Of KEY.txt, which has a caption on each line, and of photos that have none beside them"""
    captions = defaultdict(list)
    for path in sorted(folder.rglob("*.[tT][xX][tT]")):
        name = str(path.relative_to(folder).with_suffix(""))
        if not HIDDEN.search(name):
            captions[ENDING.sub("", name)] += filter(str.strip, decode(path).splitlines())
    if not captions:
        found = [path for ending in TABLES for path in sorted(folder.rglob(f"*.{ending}"))]
        fail(f"{folder} has no KEY.txt with the captions of KEY.jpg: name the file that holds them"
             f"{''.join(f', such as {path}' for path in found[:1])}; tar files go to "
             "tools/make_shards.py --index-only")  # fmt: skip
    paths = chain(*photos_below(str(folder)).values())
    photos = [ENDING.sub("", path) for path in sorted(paths)]
    if captions.keys() & {*photos}:  # else the texts are in a folder of their own
        captions = dict.fromkeys(photos, []) | captions
    rows = []
    for name, lines in captions.items():
        rows.append({"image": name, "captions": lines, "split": split_in(Path(name).parts[:-1])})
    return rows


def parquet_rows(path, photo_folder, check):
    """A photo in a cell is written into the folder, and the cell has its path instead."""
    if not path.is_file():
        fail(f"there is no {path}")
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        fail(f"{path}: this format needs a package: python -m pip install pyarrow")
    try:
        content = parquet.ParquetFile(path)
    except ValueError as error:  # of pyarrow, say for what Git LFS leaves in place of a file
        fail(f"{path} is not in this format: {error}")
    check([column_name(name) for name in content.schema_arrow.names])
    rows = []
    for batch in content.iter_batches(100):
        for row in batch.to_pylist():
            for key, value in row.items():
                content = value.get("bytes") if isinstance(value, dict) else value
                if isinstance(content, bytes):
                    name = f"{path.parent.name}_{path.stem}_{len(rows):06d}_{key}"
                    row[key] = write_photo(photo_folder / name, content)
            rows.append(row)
    return rows


def write_photo(path, content):
    """-> the path that was written, with the ending of the photo's format"""
    with suppress(OSError):  # no photo that Pillow knows: training says so
        path = Path(f"{path}.{Image.open(io.BytesIO(content)).format.lower()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path.absolute())


def parse_json(path, text):
    lines = {n: line for n, line in enumerate(text.split("\n"), 1) if line.strip()}
    first = next(iter(lines), 1)
    if len(lines) == 1 or not lines[first].rstrip().endswith("}"):  # not JSON on each line
        lines = {1: text}
    rows = []
    for number, line in lines.items():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            where = f"{path}, line {number + error.lineno - 1}"
            fail(f"{where}, is not valid JSON: {error.msg}, in {short(line)}")
    return rows if len(lines) > 1 else rows[0]


def json_rows(content):
    if isinstance(content, list):
        return content
    images, others = content.get("images"), content.get("annotations")
    if isinstance(images, list) and images and others and "file_name" in images[0]:  # COCO
        names = {str(row.get("id")): row.get("file_name") for row in images}
        named = [{**row, "file_name": names.get(str(row.get("image_id")))} for row in others]
        return images + named
    if {*map(str.lower, content)} <= {*SPLITS}:  # R2Gen
        parts = [(split, json_rows(part)) for split, part in content.items()]
        return [{"split": split, **row} for split, rows in parts for row in rows]
    if any(map(ENDING.search, content)) or all(map(str.isdigit, content)):
        named = {name: part if isinstance(part, dict) else {"captions": part}
                 for name, part in content.items()}  # fmt: skip
        return [{"image": name, **row} for name, row in named.items()]
    parts = [list(part.values()) if isinstance(part, dict) else part for part in content.values()]
    lists = {name: part for name, part in zip(content, parts) if isinstance(part, list)}
    tables = {name: part for name, part in lists.items() if part and isinstance(part[0], dict)}
    if tables:
        return join_tables(tables)
    if lists and len(lists) == len(parts) and len({*map(len, parts)}) == 1:  # of pandas
        return [dict(zip(content, cells)) for cells in zip(*parts)]
    return [content]


def join_tables(tables):
    """{name: rows} -> the rows of the largest table; those with the same keys are one"""
    joined = defaultdict(dict)
    for name, rows in tables.items():
        joined[frozenset(rows[0])][name] = rows
    table = max(joined.values(), key=lambda alike: sum(map(len, alike.values())))
    if others := [f"{name} ({len(tables[name])})" for name in tables if name not in table]:
        common.print_main(f"lists that are not read: {', '.join(others)}")
    if len(table) == 1:
        return [*table.values()][0]
    column = "split" if {*map(str.lower, table)} <= {*SPLITS} else "list"
    common.print_main(f"{len(table)} lists are read as one table, with a column named {column}: "
                      f"{short(', '.join(table))}")  # fmt: skip
    return [{column: name, **row} for name, rows in table.items() for row in rows]


def table_rows(path, text):
    """csv, or another delimiter, as the header tells, which holds no captions"""
    text = re.sub(r"^sep=.\s*", "", text)  # a first line for Excel
    header = text.split("\n", 1)[0]
    delimiter = max(",\t|;", key=header.count)
    if "://" in header or any(map(ENDING.search, re.split(rf"[{delimiter}\s\"]", header))):
        fail(f"{path} has no header, it begins with {short(header)}: add a first line that names "
             f"its columns, such as image{delimiter}caption")  # fmt: skip
    lines = io.StringIO(text, newline="")  # captions may have several lines
    reader = csv.DictReader(lines, delimiter=delimiter, restval="", strict=True)
    try:
        names = [column_name(name) for name in reader.fieldnames or ()]
        reader.fieldnames = [  # captions may have columns of one name
            f"{name}_{n}" if column_name(name) in names[:n] else name
            for n, name in enumerate(reader.fieldnames or ())
        ]
        rows = list(reader)
        for cell in chain(*map(dict.values, rows)):
            if "\n" in cell and any(map(ENDING.search, re.split(rf"[{delimiter}\n]", cell))):
                raise csv.Error(f"a quote takes several lines into one cell, {short(cell)}")
        return rows
    except csv.Error as error:
        fail(f"{path}, line {reader.line_num}: {error}: captions with quotes need those of csv")


# -------------------------------------------------------------------------------- names to paths

# When a path below the root is the photo of a name. The last two ways count only if the others
# find no photo for any name: a missing photo is not to be replaced by its mask.
WAYS = (
    lambda path, name: path == name,
    lambda path, name: path.endswith(f"/{name}"),
    lambda path, name: f"/{path}".lower().endswith(f"/{name}".lower()),
    lambda path, name: os.path.basename(path).lower() == os.path.basename(name).lower(),
    lambda path, name: True,  # the same name without its ending: people convert photos
)


def place(root, name):
    return os.path.normpath(os.path.join(root, name))


def find_photos(root, names):
    """-> {name: paths}: none, one, or several in the subfolders of the root

    If a photo was found for names that differ in their folders, these names follow it.
    """
    places = {name: list(filter(os.path.isfile, [place(root, name)])) for name in names}
    for n, alike in enumerate(WAYS):
        if all(places.values()) or n > 2 and any(places.values()):
            break
        sharing = defaultdict(set)
        for name in [name for name in places if not places[name]]:
            stem = ENDING.sub("", os.path.basename(name)).lower()
            for path in photos_below(root).get(stem, ()):
                cut = path if ENDING.search(name) else ENDING.sub("", path)
                if alike(cut, name):
                    places[name].append(place(root, path))
                    sharing[place(root, path)].add(name.lower())
        for paths in places.values() if n > 2 else ():
            others = set().union(*map(sharing.get, paths))
            paths += others if len(others) > 1 else ()
    return places


@cache
def photos_below(root):
    """-> {name without folder and ending, in lower case: paths from the root on}"""
    found = defaultdict(list)
    for folder, _, files in os.walk(root):
        for file in filter(ENDING.search, files):
            path = os.path.relpath(os.path.join(folder, file), root)
            if not HIDDEN.search(path):
                found[ENDING.sub("", file).lower()].append(path)
    return found
