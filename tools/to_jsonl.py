"""Convert captions of other projects to our photos.jsonl

    python tools/to_jsonl.py dataset_flickr8k.json --root flickr8k --output flickr8k.jsonl
    python tools/to_jsonl.py FOLDER    # with photos KEY.jpg and, in KEY.txt, a caption on each line
    python tools/to_jsonl.py train.csv val.csv --image-column photo --caption-column short long

It reads Karpathy's dataset_*.json, captions_*.json of COCO, token.txt of Flickr8k, and .csv, .tsv,
.json, .jsonl and .parquet with a photo and captions in each row, or {photo: captions}. What is
certain is read, what is not is refused in one line, and what is left out is counted.

The photo's column is the one of which nearly all rows name a photo below --root, by its path or, if
none has a path, by its name without folder and ending. Captions lose HTML, invisible characters and
ligatures. Tags in a cell stand between |; if a column has none, between ; and else between commas.
A column of --tag-column with only 0 and 1, true and false, yes and no, or one mark and empty cells
is a tag by its name.
"""

import argparse
import ast
import csv
import html
import io
import json
import os
import re
import shlex
import sys
import unicodedata
from collections import Counter, defaultdict
from contextlib import suppress
from functools import cache
from pathlib import Path

import regex
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import fail, make_folder, print_main

SPLITS = dict.fromkeys(("train", "training", "restval"), "train")
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
SPLITS |= dict.fromkeys(("test", "testing"), "test")
# Names of columns; "caption" also stands for captions, caption_1, caption_2... If there are several
# kinds, only the first of them is certain.
CAPTIONS = "caption raw sentence text description title comment report finding prompt txt".split()
TAGS = "tag label keyword categorie category classe class finding_label".split()
MEANT = re.compile("|".join(rf"{kind}s?_?\d*" for kind in CAPTIONS + TAGS))
SETS = "split", "set", "subset", "partition", "fold"
PHOTO = re.compile("image|img|photo|pic|file|path|jpg")
NUMBERED = re.compile("key|name|(^|_)(id|uid|no|nr|number)(_|$)")  # its numbers may name photos
# Cells, in lower case
NOTHING = "", "nan", "none", "null", "n/a"  # what programs write into an empty one
YES, NO = ("1", "1.0", "true", "yes", "y"), ("0", "0.0", "false", "no", "n")
NUMBER = re.compile(r"[-+]?\d+([.,]\d*)?")
# Within texts
ENDING = re.compile(f"(?i)({'|'.join(map(re.escape, common.PHOTO_ENDINGS))})$")
ENTITY = re.compile(r"&#?\w+;")
HTML_TAG = re.compile(r"(?i)</?(?:p|br|b|i|u|em|strong|div|span|a|ul|ol|li|font|h\d)\b[^<>]*>")
INVISIBLE = regex.compile(r"[\p{Cs}\u115f\u1160\u2800\u3164\uffa0]")  # \p{Cs}: half emojis
STRING = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(\s+(?=['"]))?""", re.S)  # Python's


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="captions, in UTF-8 or UTF-16: one file, several "
        "(train, val or test in their names is the split), or a folder")  # fmt: skip
    add("--root", help="folder of the photos (default: that of each file)")
    name = dict(type=column_name, default=[])
    add("--image-column", **name, nargs=1, help="column or key with the photo's path or name")
    add("--caption-column", **name, nargs="+", help="one or more, with captions")
    add("--tag-column", **name, nargs="+", help="one or more, with tags, or with 0 and 1")
    add("--output", default="photos.jsonl", help=".jsonl to write; an existing one is replaced")
    return parser.parse_args(argv)


def main(args):
    output = Path(os.path.abspath(args.output))
    files = [Path(os.path.abspath(file)) for file in args.files]
    if output.suffix != ".jsonl" or output.is_dir() or output in files:
        fail(f"--output {output} must end in .jsonl, be no folder, and must not be the input file")
    make_folder(output.parent)
    together = os.path.commonpath([file.parent for file in files])
    photos = {}  # path, links resolved: {"image": the path that was found, "captions", ...}
    notes = defaultdict(list)  # what was left out or changed: all examples of it
    for file in files:
        inside = file.relative_to(together).with_suffix("")  # en/train/0 is not de/train/0
        rows = read_rows(file, output.with_name(f"{output.stem}_photos") / inside, args)
        words = {*re.findall("[a-z]+", file.stem.lower()), file.parent.name}
        splits = {SPLITS[word] for word in words if word in SPLITS}
        if len(files) > 1 and len(splits) == 1:
            rows = [{"split": split, **row} for split in splits for row in rows]
        root = os.path.abspath(args.root or (file if file.is_dir() else file.parent))
        columns = choose_columns(file, rows, root, args)
        gather(rows, root, columns, photos, notes)
    write(output, list(photos.values()), notes)


# ---------------------------------------------------------------------------------- files to rows


def read_rows(path, photo_folder, args):
    """The rows of a file, or of a folder of KEY.txt -> [{name of a column: value}]"""
    if path.is_dir():
        rows = folder_rows(path)
    elif not path.is_file():
        fail(f"there is no {path}")
    elif path.suffix.lower() == ".parquet":
        rows = parquet_rows(path, photo_folder, args)
    elif (text := decode(path)).lstrip().startswith(("{", "[")):
        rows = json_rows(path, text)
    else:
        rows = table_rows(path, text)
    bad = [row for row in rows if not isinstance(row, dict)]
    if bad or not rows:
        fail(f"{path} needs rows with a name for each cell, but has {short(bad[:1])}")
    return rows


def column_name(text):
    """The form in which names of a file and of a flag are compared: Finding-Labels, say"""
    return re.sub(r"\W+", "_", text.strip().lower())


def short(value):
    return common.one_line(str(value))[:150]


def decode(path):
    """-> the text of a file in UTF-8, or in UTF-16 with a byte order mark; lines end with \\n"""
    content = path.read_bytes()
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in content and not wide:
        fail(f"{path} is no text: give .json, .jsonl, .csv, .tsv, .txt or .parquet. A spreadsheet "
             "can be saved as .csv, tar files go to tools/make_shards.py")  # fmt: skip
    try:
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{path} is not UTF-8 (byte {error.start}). Convert it, for example from CP1252: "
             f"iconv -f CP1252 -t UTF-8 {shlex.quote(str(path))} > NEW_FILE")  # fmt: skip
    return text.replace("\r\n", "\n").replace("\r", "\n")  # \r alone: of Excel for Mac


def folder_rows(folder):
    """Of KEY.txt, which has a caption on each line, and of photos that have none beside them"""
    captions = defaultdict(list)
    for path in common.list_photos(folder, (".txt",)):
        name = ENDING.sub("", os.path.relpath(path, folder)[:-4])
        captions[name] += filter(str.strip, decode(Path(path)).split("\n"))
    if not captions:
        tables = common.list_photos(folder, (".parquet", ".jsonl", ".json", ".csv", ".tsv"))
        fail(f"{folder} has no KEY.txt with the captions of KEY.jpg: name the file that holds them"
             f"{''.join(f', such as {path}' for path in tables[:1])}; tar files go to "
             "tools/make_shards.py --index-only")  # fmt: skip
    photos = [ENDING.sub("", os.path.relpath(path, folder)) for path in common.list_photos(folder)]
    if captions.keys() & {*photos}:  # else the texts are in a folder of their own
        captions = dict.fromkeys(photos, []) | captions
    rows = [{"image": name, "captions": captions[name]} for name in captions]
    for row in rows:
        words = [re.sub(r"\d", "", word.lower()) for word in row["image"].split("/")[:-1]]
        row["split"] = next((SPLITS[word] for word in words if word in SPLITS), None)  # train2017
    return rows


def parquet_rows(path, photo_folder, args):
    """A photo in a cell is written into the folder, and the cell has its path instead."""
    try:
        from pyarrow import parquet

        content = parquet.ParquetFile(path)
    except ModuleNotFoundError:
        fail(f"{path}: this format needs a package: python -m pip install pyarrow")
    except ValueError as error:  # of pyarrow, say for what Git LFS leaves in place of a file
        fail(f"{path} is not in this format: {error}")
    kinds = {field.name: str(field.type) for field in content.schema_arrow}
    wanted, _, _ = named_columns(path, args, kinds)
    filled = [name for name in kinds if re.match("(large_)?binary|struct<.*bytes:", kinds[name])]
    if len(filled) > 1 and not wanted:
        fail(f"{path}: which column has the photo, {' or '.join(filled)}? Give --image-column")
    wanted = wanted or filled
    columns = [name for name in kinds if name not in filled or name in wanted]
    rows = []
    for batch in content.iter_batches(100, columns=columns):
        for row in batch.to_pylist():
            for key in {*filled} & {*wanted}:
                place = f"{photo_folder}/{len(rows):06d}_{column_name(key)}"
                row[key] = write_photo(place, row[key])
            rows.append(row)
    return rows


def write_photo(place, cell):
    """-> the path of the photo that was written; None if Pillow does not know its format"""
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if not content:
        return cell
    try:
        path = Path(f"{place}.{Image.open(io.BytesIO(content)).format.lower()}")
    except OSError:
        return None
    make_folder(path.parent)
    if path.exists() and path.read_bytes() != content:
        fail(f"{path} is another photo, of an earlier call: delete its folder or change --output")
    path.write_bytes(content)
    return str(path)


def json_rows(path, text):
    """A list of rows, one on each line, COCO's file, {photo: captions}, or an object with a list"""
    lines = {n: line for n, line in enumerate(text.split("\n"), 1) if line.strip()}
    if len(lines) == 1 or not lines[min(lines)].rstrip().endswith("}"):  # not JSON on each line
        lines = {1: text}
    rows = []
    for number, line in lines.items():
        try:
            rows.append(json.loads(line, object_pairs_hook=unique))
        except json.JSONDecodeError as error:
            where = f"{path}, line {number + error.lineno - 1}"
            fail(f"{where}, is not valid JSON: {error.msg}, in {short(line)}")
    content = rows if len(lines) > 1 else rows[0]
    if isinstance(content, list):
        return content
    lists = {name: part for name, part in content.items() if isinstance(part, list) and part}
    tables = {name: part for name, part in lists.items() if isinstance(part[0], dict)}
    images, others = (tables.get(name, [{}]) for name in ("images", "annotations"))
    if "file_name" in images[0] and "image_id" in others[0]:  # COCO
        names = {str(row.get("id")): row.get("file_name") for row in images}
        if len(names) < len({row.get("file_name") for row in images}):
            fail(f"{path}: several images have the same id")
        named = [{**row, "file_name": names.get(str(row.get("image_id")))} for row in others]
        return images + named
    keys = [column_name(key) for key in content]
    is_row = any(MEANT.fullmatch(key) or PHOTO.fullmatch(key) for key in keys)
    if any(map(ENDING.search, content)) or not tables and not is_row:
        return [{"key": key, **(part if isinstance(part, dict) else {"captions": part})}
                for key, part in content.items()]  # fmt: skip
    if len(tables) > 1:
        fail(f"{path} has several lists, {short(', '.join(tables))}: write the one that is meant, "
             "or each split, to a file of its own")  # fmt: skip
    return [*tables.values()][0] if tables else [content]


def unique(pairs):
    """An object of JSON, whose keys must differ: the last one would hide the others"""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        fail(f"an object of the JSON file has the key {short(key)} twice")
    return found


def table_rows(path, text):
    """csv or tsv, as the header tells; or token.txt: photo, tab, caption, and no quotes"""
    text = re.sub(r"^sep=.\n", "\n", text)  # for Excel
    header = text.lstrip("\n").split("\n", 1)[0]
    delimiter = max(",\t|;", key=header.count)
    form = {"delimiter": delimiter, "strict": True}
    names, rows, broken, end = None, [], [], 0
    if ENDING.search(re.sub(r"#\d+$", "", header.split("\t")[0])) and "\t" in header:
        names, text = ["image", "caption"], re.sub(r"#\d+\t", "\t", text)
        form = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    elif "://" in header or any(map(ENDING.search, re.split(rf"[{delimiter}\s\"]", header))):
        fail(f"{path} has no header, it begins with {short(header)}: add a first line that names "
             f"its columns, such as image{delimiter}caption")  # fmt: skip
    reader = csv.reader(io.StringIO(text), **form)
    try:
        for cells in reader:
            line, end = end + 1, reader.line_num
            if len(cells) > len(names or cells):
                fail(f"{path}, line {line} has {len(cells)} cells for {len(names)} columns: "
                     f"captions with {delimiter} need quotes")  # fmt: skip
            elif cells and names:
                rows.append({**dict.fromkeys(names, ""), **dict(zip(names, cells))})
                broken += [(line, cell) for cell in cells if "\n" in cell][:1]
            elif cells:  # captions may have columns of one name
                names = [name.strip() for name in cells]
                plain = [column_name(name) for name in cells]
                names = [name if plain.index(plain[n]) == n else f"{name}_{n}"
                         for n, name in enumerate(names)]  # fmt: skip
    except csv.Error as error:
        fail(f"{path}, line {reader.line_num}: {error}: captions with quotes need those of csv")
    swallowed = [row for row in broken if any(map(ENDING.search, re.split(r"[,\t|;\n]", row[1])))]
    if swallowed or len(broken) > 0.01 * len(rows):
        line, cell = (swallowed or broken)[0]
        fail(f"{path}, line {line}: a quote takes several lines into one cell, {short(cell)}, as in"
             f" {len(broken)} of {len(rows)} rows. Is it not closed? If it is, write spaces for the"
             " line breaks")  # fmt: skip
    if broken:
        print_main(f"{path}: line breaks within quotes in {len(broken)} rows, {short(broken[0])}")
    return rows


# ---------------------------------------------------------------------------------------- columns


def named_columns(path, args, keys, about=""):
    """-> columns with the photo (if a flag names it), captions, and tags

    Ends with one line if a flag names one that is missing, or if nothing tells the captions.
    """
    names = {column_name(key): key for key in keys}
    flags = args.image_column, args.caption_column, args.tag_column
    if missing := [name for flag in flags for name in flag if name not in names]:
        fail(f"{path} has no column {', '.join(missing)}, but {short(', '.join(names))}")
    photo, captions, tags = ([names[name] for name in flag] for flag in flags)
    usual = columns_of(CAPTIONS, names)
    if not (captions or tags or usual):
        fail(f"{path}: which columns hold the photo and its caption? Name them with "
             "--image-column, --caption-column or, for tags alone, --tag-column: "
             f"{short(', '.join(names))}{about}")  # fmt: skip
    return photo, captions or usual, tags or columns_of(TAGS, names)


def columns_of(kinds, names):
    """The columns of the first kind, as caption_1 and caption_2, or of the only other kind"""
    found = [[names[name] for name in names if re.fullmatch(rf"{kind}s?_?\d*", name)]
             for kind in kinds]  # fmt: skip
    there = list(filter(None, found))
    return found[0] or (there[0] if len(there) == 1 else [])


def choose_columns(file, rows, root, args):
    """-> {what: names of columns}, which it prints

    what: "photo", "captions", "split", "tags", "tags where 1" (yes or no: their name is a tag)
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    photo, captions, tags = named_columns(file, args, keys, f". The first row is {short(rows[0])}")
    splits = [key for key in keys if key.lower() in SETS and values_of(rows, key) <= SPLITS.keys()]
    splits = [key for key in keys if key.lower() == "split"] or splits[:1]
    others = [key for key in keys if key not in splits and not MEANT.fullmatch(column_name(key))]
    photo = [photo_column(file, rows, photo or others, root, given=bool(photo))]
    if {*photo} & {*captions, *tags}:
        fail(f"{file}: the column {photo[0]} has the paths of the photos: it cannot hold captions "
             f"or tags, too. The columns are {short(', '.join(keys))}")  # fmt: skip
    marks, words = marked(file, rows, tags, bool(args.tag_column))
    columns = {"photo": photo, "captions": captions, "tags": words, "split": splits}
    columns["tags where 1"] = marks
    columns["not used"] = sorted({*keys}.difference(*columns.values()))
    taken = [f"{what}: {short(', '.join(names))}" for what, names in columns.items() if names]
    print_main(f"{file}: {'; '.join(taken)}")
    return columns


def photo_column(file, rows, keys, root, given):
    """The column of which nearly all rows name a photo, by its path before by its name alone

    Ends with one line if two could be it, or if fewer than half of the rows name a photo.
    """
    rows = rows[:: len(rows) // 10_000 + 1]
    found = []
    for key in keys:
        names = [names_of(row, key) for row in rows]
        places, by_path = find_photos(root, [name for row in names for name in row])
        named = PHOTO.search(column_name(key)) or NUMBERED.search(column_name(key))
        if named or not all(map(str.isdigit, places)):  # not ages or prices, say
            photos = [[places[name] for name in row if places[name]] for row in names]
            matched = sum(map(bool, photos)) / len(rows)
            found.append((matched >= 0.9, by_path, matched, key.lower() != "id", key, photos))
    nearly, by_path, matched, _, best, photos = max(found, default=[0] * 6)
    if not matched:
        there = [os.path.relpath(path, root) for path in common.list_photos(root)[:3]] or "no photo"
        names = [name for key in keys for row in rows for name in names_of(row, key)][:1]
        fail(f"{root} and its subfolders hold no photo of {file}, such as {short(names)} of "
             f"{short(', '.join(keys))}, but {there}: do the names differ? See --root and "
             "--image-column")  # fmt: skip
    for nearly_too, path_too, matched_too, is_named, key, others in found:
        as_good = path_too > by_path or path_too == by_path and nearly_too == nearly
        as_good = as_good and (is_named or not PHOTO.search(best))  # "id" is that of a caption
        differ = [pair for pair in zip(photos, others) if all(pair) and pair[0] != pair[1]]
        if differ and as_good and matched_too >= 0.5:
            fail(f"{file}: which column names the photo, {best} or {key}? For one row they are "
                 f"{short(differ[0])}: give --image-column")  # fmt: skip
    if matched < 0.5 and not given:
        fail(f"{file}: only {matched:.0%} of the rows name a photo below {root}, in the column "
             f"{best}. See --root; --image-column {best} leaves out the others")  # fmt: skip
    return best


def marked(file, rows, columns, given):
    """Columns with tags -> those that say yes or no in each row, and those with words

    One mark beside empty cells is a yes. Other cells beside yes or no, and numbers, are refused.
    """
    values = {column: values_of(rows, column) for column in columns}
    marks, words = [], []
    for column in columns:
        odd = sorted(values[column].difference(YES, NO))
        alike = [name for name in columns if values[name] == values[column]]
        if values[column] and not odd or len(odd) == 1 and odd[0] in "x*+✓✔✗•●":
            marks.append(column)
            if not values[column] & {*NO}:  # empty cells say no
                for row in rows:
                    row[column] = "0" if is_empty(row.get(column)) else "1"
        elif odd and given and (len(odd) < len(values[column]) or all(map(NUMBER.fullmatch, odd))):
            fail(f"{file}: the column {column} holds {short(odd[0])}, where 0 and 1 are expected, "
                 "or true and false, yes and no, or one mark and empty cells")  # fmt: skip
        elif len(alike) > 1 and len(odd) in (1, 2):
            fail(f"{file}: the columns {short(', '.join(alike))} hold nothing but "
                 f"{short(' and '.join(odd))}: write 1 and 0")  # fmt: skip
        elif len(odd) == len(values[column]) and not (odd and all(map(NUMBER.fullmatch, odd))):
            words.append(column)
    if marks and not given:
        fail(f"{file}: with --tag-column {marks[0]}, photos with a 1 have the tag {marks[0]}; "
             "or write names of classes in place of 0 and 1")  # fmt: skip
    return marks, words


def values_of(rows, column):
    """Different values of a column, without empty ones, as lower-case text"""
    return {str(row.get(column)).strip().lower() for row in rows}.difference(NOTHING)


def is_empty(cell):
    return cell is None or str(cell).strip().lower() in NOTHING


def cells(row, column):
    """The values in a cell: one that holds a list, also written as text, gives its items."""
    value = row.get(column)
    if isinstance(value, str) and value.strip()[:1] + value.strip()[-1:] in ("[]", "{}"):
        commas = STRING.sub(lambda string: string[1] + ", " * bool(string[2]), value)  # of numpy
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(commas.strip())
        with suppress(ValueError):
            value = json.loads(row[column])
    return value if isinstance(value, list) else [value]


def clean(text):
    """Without HTML's tags and entities, ligatures, what is invisible, half an emoji"""
    for _ in range(2):  # the web's are often escaped twice
        text = ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    text = HTML_TAG.sub(" ", text)
    text = re.sub("[\ufb00-\ufb06]", lambda two: unicodedata.normalize("NFKC", two[0]), text)
    return common.one_line(INVISIBLE.sub("", text))


# -------------------------------------------------------------------------------- rows to photos


def gather(rows, root, columns, photos, notes):
    """Add the rows to {path of a photo: {"image", "captions", "tags", "split"}}."""
    [column] = columns["photo"]
    places, _ = find_photos(root, [name for row in rows for name in names_of(row, column)])
    for name, paths in places.items():
        if not paths:
            notes["missing photos"].append(os.path.join(root, name))
        elif len(paths) > 1:
            notes["names of several photos, or several names of one"].append([name, *paths])
        elif paths[0] != os.path.join(root, name):
            notes["photos looked up by name"].append([name, paths[0]])
    separators = {}  # what stands between tags: the first of | ; and , that the column holds
    for name in columns["tags"]:
        texts = "".join(clean(row[name]) for row in rows if isinstance(row.get(name), str))
        separators[name] = next((mark for mark in "|;" if mark in texts), ",")
    for row in rows:
        names = names_of(row, column)
        captions = captions_of(row, columns["captions"], notes)
        tags = tags_of(row, separators, columns["tags where 1"], notes)
        splits = [cell for name in columns["split"] for cell in cells(row, name)]
        splits = [str(cell).strip().lower() for cell in splits if not is_empty(cell)]
        if not names:
            notes["rows without a photo"].append(row)
        if len(names) > 1 and len(captions) > 1:
            notes["rows with several photos and several captions"].append(row)
            continue
        for path in (places[name][0] for name in names if len(places[name]) == 1):
            photo = photos.setdefault(os.path.realpath(path), {"image": path, "captions": []})
            known = [caption for caption in captions if caption in photo["captions"]]
            notes["captions that their photo has already"] += [[path, caption] for caption in known]
            photo["captions"] = [*dict.fromkeys(photo["captions"] + captions)]
            if tags is not None:
                photo["tags"] = [*dict.fromkeys(photo.get("tags", []) + tags)]
            for split in splits[:1]:
                split = SPLITS.get(split, split)
                if photo.setdefault("split", split) != split:
                    notes["rows in another split than their photo's first"].append(row)


def names_of(row, column):
    """-> the names of a row's photos: none, one, or several that share its caption"""
    names = []
    for name in cells(row, column):
        if isinstance(name, dict):  # of Hugging Face
            name = name.get("path") or name.get("file_name")
        folder = row.get("filepath") or ""
        if column == "filename" and not ENDING.search(folder):  # Karpathy's COCO has two folders
            name = os.path.join(folder, name or "")
        if not is_empty(name):
            names.append(os.path.normpath(str(name).strip().replace("\\", "/")))
    return names


def captions_of(row, columns, notes):
    captions = []
    for text in [text for column in columns if column in row for text in cells(row, column)]:
        if isinstance(text, dict):
            text = next((text[key] for key in ("raw", "caption", "text") if key in text), text)
        cleaned = clean(text) if isinstance(text, str) else text
        if cleaned in ("", None):
            notes["empty captions"].append(row)
        elif not isinstance(text, str):
            notes["captions that are no text"].append(text)
        elif is_empty(cleaned) or not regex.search(r"[\p{L}\p{So}]", cleaned):
            notes["captions without a letter"].append(repr(text))
        else:
            captions.append(cleaned)
            if cleaned != " ".join(text.split()):
                notes["captions cleaned, and kept"].append(repr(text))
    return captions


def tags_of(row, separators, marks, notes):
    """-> a list of strings; None if the row says nothing about them"""
    tags, known = [], False
    for name in separators.keys() & row.keys():
        known |= row[name] == []
        for value in cells(row, name):
            value = value.get("name", value) if isinstance(value, dict) else value
            if isinstance(value, str):
                whole = isinstance(row[name], list) or value is not row[name]
                tags += [value] if whole else clean(value).split(separators[name])
            elif value is not None:
                notes["tags that are no text"].append(value)
    tags = [clean(tag) for tag in tags if not is_empty(clean(tag))]
    empty = [is_empty(row.get(name)) for name in marks]
    if any(empty) and not all(empty):
        notes["empty cells beside 0 and 1, which count as 0"].append(row)
    tags += [clean(name) for name in marks if str(row.get(name)).strip().lower() in YES]
    return tags if tags or known or not all(empty) else None


def find_photos(root, names):
    """-> {name: paths}: none, one, or several below the root; was any found by its path?

    By its path: a photo's path ends with the name. Otherwise, all are looked up by their names
    without folder and ending (a missing photo is not to be replaced by its mask); names that differ
    in their folders follow a photo that they share.
    """
    below = photos_below(root)
    places = {}
    for name in names:
        path = os.path.join(root, name)
        paths = below.get(plain(name), [])
        if ENDING.search(name):
            ending = ENDING.search(name)[0].lower()
            paths = [path for path in paths if path.lower().endswith(ending)]
            paths = [path] if os.path.isfile(path) else paths
        places[name] = paths
    if any(places.values()):
        return places, any(places[name] and ENDING.search(name) for name in places)
    sharing = defaultdict(set)
    for name in places:
        places[name] = below.get(plain(os.path.basename(name)), [])
        for path in places[name]:
            sharing[path].add(name.lower())
    for name, paths in places.items():
        others = set().union(*map(sharing.get, paths))
        places[name] = paths + [*others] * (len(others) > 1)
    return places, False


def plain(name):
    """Composed (é is one character), in lower case, without the ending of photos"""
    return ENDING.sub("", unicodedata.normalize("NFC", name).lower())


@cache
def photos_below(root):
    """-> {end of a path, see plain: paths}: those of a/b/1.jpg are a/b/1, b/1 and 1"""
    found = defaultdict(list)
    for path in common.list_photos(root):
        parts = plain(os.path.relpath(path, root)).split("/")
        for n in range(len(parts)):
            found["/".join(parts[n:])].append(path)
    return found


def write(output, rows, notes):
    """Write the lines; print counts of what they hold and of what was left out."""
    splits = Counter(row.get("split", "no split") for row in rows)
    counts = {f"photos ({split})": splits[split] for split in splits}
    for row in rows:
        row["image"] = os.path.relpath(row["image"], output.parent)
        if splits.keys() <= {"train", "no split"}:  # without any split, some will be held out
            row.pop("split", None)
    captions = [caption for row in rows for caption in row["captions"]]
    different = f", {len({*captions})} different ones" * (len({*captions}) < len(captions))
    counts[f"captions{different}"] = len(captions)
    if tags := [tag for row in rows for tag in row.get("tags", [])]:
        counts[f"tags, {len({*tags})} different ones, the first: {short(tags[0])}"] = len(tags)
    notes["photos without a caption"] = [row["image"] for row in rows if not row["captions"]]
    for what, examples in notes.items():
        if examples:
            counts[f"{what}, the first: {short(examples[0])}"] = len(examples)
    print_main("\n".join(f"{count:7d} {what}" for what, count in counts.items()))
    if not captions and not tags:
        fail(f"no {'caption' if rows else 'photo'} is left: {output} is not written")
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    output.write_bytes("\n".join([*lines, ""]).encode(errors="replace"))
    print_main(f"the first line: {lines[0]}")
    used = [row for row in rows if row.get("captions" if captions else "tags")]
    found = Counter(row.get("split", "train") for row in used)
    train, *others = sorted(found, key=lambda name: (name != "train", name == "val", -found[name]))
    val = "val" if "val" in others else [*others, train][0]
    flags = "virtex.py" if captions else "tp.py --labels instances"
    flags += f" --data {shlex.quote(str(output))}"
    flags += "" if train == "train" else f" --train-split {shlex.quote(train)}"
    if any("split" in row for row in rows):
        flags += "" if val == "val" else f" --val-split {shlex.quote(val)}"
        flags += "    # no other split can be validated on" if train == val else ""
    print_main(f"python {flags}")


if __name__ == "__main__":
    main(get_args())
