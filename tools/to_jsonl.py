"""Convert captions of other projects to our photos.jsonl

    python tools/to_jsonl.py captions.csv --root photos --output photos.jsonl
    python tools/to_jsonl.py FOLDER    # with photos KEY.jpg and, in KEY.txt, a caption on each line
    python tools/to_jsonl.py a.csv b.csv --split val --caption-column short long

It reads .csv, .tsv, .parquet, .json and .jsonl with a photo and its captions in each row, COCO's
captions_*.json, Karpathy's dataset_*.json and token.txt of Flickr8k. What is certain is read, what
is not is refused with the flag to give, and what is left out is counted.

The photo's column is the one of which nearly all rows name a photo below --root, by its path or, if
none has a path, by its name without folder and ending. Tags in a cell stand between |, or ;, or
commas. A column with 0 and 1, or yes and no, or one mark and empty cells is a tag by its name.
"""

import argparse
import csv
import html
import io
import json
import os
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import fail, make_folder, print_main

CAPTIONS = re.compile(r"(captions?|sentences)_?\d*")  # names of columns; sentences: Karpathy's
WORDS = re.compile("caption|sentence|text|title|tag|label|class|categor|keyword")  # of no photo
NAMES = re.compile("image|img|photo|pic|file|path|key|name|(^|_)(id|no|nr|number)$")
SPLITS = {"restval": "train", "validation": "val", "valid": "val", "dev": "val"}
NOTHING = "", "nan", "none", "null", "n/a"  # cells in lower case, as programs fill empty ones
YES, NO = ("1", "1.0", "true", "yes", "y"), ("0", "0.0", "false", "no", "n")
MARKS = "x", "*", "+", "✓", "✔", "✗", "•", "●"
NUMBER = re.compile(r"[-+]?\d+([.,]\d*)?")
ENDING = re.compile(f"(?i)({'|'.join(map(re.escape, common.PHOTO_ENDINGS))})$")
HTML_TAG = re.compile(r"(?i)</?(?:p|br|b|i|u|em|strong|div|span|a|ul|ol|li|font|h\d)\b[^<>]*>")


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    name = {"type": column_name, "default": []}
    add("files", nargs="+", metavar="FILE", help="a file with captions, or a folder of KEY.txt")
    add("--root", help="folder of the photos (default: that of each FILE)")
    add("--split", help="split of all photos (default: what the column split says)")
    add("--image-column", **name, nargs=1, help="column or key with the photo's path or name")
    add("--caption-column", **name, nargs="+", help="one or more, with captions (default: caption)")
    add("--tag-column", **name, nargs="+", help="one or more, with tags, or with 0 and 1")
    add("--output", default="photos.jsonl", help=".jsonl to write; an existing one is replaced")
    return parser.parse_args(argv)


def main(args):
    output = Path(os.path.abspath(args.output))
    files = [Path(os.path.abspath(file)) for file in args.files]
    if output.suffix != ".jsonl" or output.is_dir() or output in files:
        fail(f"--output {output} must end in .jsonl, be no folder, and must not be the input file")
    make_folder(output.parent)
    photos = {}  # path, links resolved: {"image": the path that was found, "captions", ...}
    notes = defaultdict(list)  # what was left out or changed: all examples of it
    for file in files:
        rows = read_rows(file, args)
        root = os.path.abspath(args.root or (file if file.is_dir() else file.parent))
        columns = choose_columns(file, rows, root, args)
        gather(rows, root, columns, args.split, photos, notes)
    write(output, list(photos.values()), notes)


def read_rows(path, args):
    """The rows of a file, or of a folder of KEY.txt -> [{name of a column: value}]"""
    if path.is_dir():
        rows = folder_rows(path)
    elif not path.is_file():
        fail(f"there is no {path}")
    elif path.suffix.lower() == ".parquet":
        rows = parquet_rows(path)
    elif (text := decode(path)).lstrip().startswith(("{", "[")):
        rows = json_rows(path, text.rstrip())
    else:
        rows = table_rows(path, text, args)
    if not rows or not all(row and isinstance(row, dict) for row in rows):
        fail(f"{path} needs rows with a name for each cell, but begins with {short(rows[:1])}")
    return rows


def column_name(text):
    """The form in which names of a file and of a flag are compared: finding_labels, say"""
    return re.sub(r"\W+", "_", text.strip().lower())


def short(value):
    return common.one_line(str(value))[:150]


def decode(path):
    """-> the text of a file, with lines that end with \\n"""
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    if "\0" in text or "\ufffd" in text:
        fail(f"{path} is not UTF-8 text: save it as such, a spreadsheet as .csv")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # \r alone: of Excel for Mac


def folder_rows(folder):
    """Of KEY.txt, which has a caption on each line, and of photos that have none beside them"""
    captions = defaultdict(list)
    for path in common.list_photos(folder, (".txt",)):
        lines = decode(Path(path)).split("\n")
        captions[plain(os.path.relpath(path, folder)[:-4])] += filter(str.strip, lines)
    if not captions:
        fail(f"{folder} has no KEY.txt beside KEY.jpg: name the file that holds the captions")
    photos = [os.path.relpath(path, folder) for path in common.list_photos(folder)]
    keys = [ENDING.sub("", plain(photo)) for photo in photos]
    rows = [{"image": key, "captions": captions[key]} for key in captions if key not in {*keys}]
    if len(rows) < len(captions):  # else the texts are in a folder of their own
        for photo, key in zip(photos, keys):
            rows.append({"image": photo, "captions": captions.get(key, [])})
    return rows


def parquet_rows(path):
    try:
        from pyarrow import parquet

        content = parquet.ParquetFile(path)
    except ModuleNotFoundError:
        fail(f"{path}: this format needs a package: python -m pip install pyarrow")
    except ValueError as error:  # of pyarrow, say for what Git LFS leaves in place of a file
        fail(f"{path} is not in this format: {error}")
    filled = [field.name for field in content.schema_arrow if "binary" in str(field.type)]
    if filled:
        fail(f"{path} holds photos in {filled[0]}: see docs/running.md, which writes them to files")
    return content.read().to_pylist()


def json_rows(path, text):
    """A list of rows, one on each line, COCO's file, or an object with one list of rows"""
    decoder, rows, end = json.JSONDecoder(), [], 0
    try:
        while end < len(text):
            row, end = decoder.raw_decode(text, re.compile(r"\s*").match(text, end).end())
            rows.append(row)
    except (ValueError, RecursionError) as error:
        fail(f"{path} is not valid JSON: {error}")
    content = rows if len(rows) > 1 else rows[0]
    if isinstance(content, list):
        return content
    lists = {name: part for name, part in content.items() if isinstance(part, list) and part}
    tables = {name: part for name, part in lists.items() if isinstance(part[0], dict)}
    if "images" in tables and "annotations" in tables:  # COCO's
        images, others = tables["images"], tables["annotations"]
        files = {str(row.get("id")): row.get("file_name") for row in images}
        if len(files) < len({row.get("file_name") for row in images}):
            fail(f"{path}: several images have the same id")
        for row in others:
            row["file_name"] = files.get(str(row.get("image_id")))
        return images + others
    return rows if len(tables) != 1 else list(tables.values())[0]


def table_rows(path, text, args):
    """csv or tsv, as the header tells; or token.txt: photo#number, tab, caption, and no quotes"""
    header = text.lstrip("\n").split("\n")[0]
    form = {"delimiter": max(",\t|;", key=header.count), "strict": True}
    if "\t" in header and ENDING.search(re.sub(r"(#\d+)?\t.*", "", header)):
        text = re.sub(r"#\d+\t", "\t", text)
        form = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "fieldnames": ["image", "caption"]}
    reader = csv.DictReader(io.StringIO(text.lstrip("\n")), restval="", **form)
    rows, broken = [], []
    try:
        named_columns(path, args, reader.fieldnames or [])
        for row in reader:
            if None in row:
                fail(f"{path}, line {reader.line_num}, has too many cells: captions need quotes")
            rows.append(row)
            breaks = "".join(row.values()).count("\n")
            broken += [f"line {reader.line_num - breaks}: {short(row)}"] if breaks else []
    except csv.Error as error:
        fail(f"{path}, line {reader.reader.line_num}: {error}: quotes must be those of csv")
    if broken:
        print_main(f"{path}: line breaks within quotes in {len(broken)} rows, {broken[0]}")
    if len(broken) > 0.01 * len(rows):
        fail(f"{path}, {broken[0]}: a quote takes several lines into one cell. Is it not closed?")
    return rows


def named_columns(path, args, keys):
    """-> columns with the photo (if a flag names it), with captions, and with tags"""
    names = {column_name(key): key for key in keys}
    if len(names) < len(keys):
        fail(f"{path} has two columns of one name: {short(', '.join(keys))}")
    flags = args.image_column, args.caption_column, args.tag_column
    missing = [name for flag in flags for name in flag if name not in names]
    if missing:
        fail(f"{path} has no column {', '.join(missing)}, but {short(', '.join(names))}")
    photo, captions, tags = ([names[name] for name in flag] for flag in flags)
    captions = captions or [names[name] for name in names if CAPTIONS.fullmatch(name)]
    if not captions and not tags:
        fail(f"{path} has no column caption: name it with --caption-column (or --tag-column), or "
             f"begin with the names of the columns, which are now {short(', '.join(keys))}")
    return photo, captions, tags  # fmt: skip


def choose_columns(file, rows, root, args):
    """-> {what: names of columns}, which it prints; "tags where 1" say yes or no"""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    photo, captions, tags = named_columns(file, args, keys)
    others = [key for key in keys if key not in captions + tags]
    marks = find_marks(file, rows, tags)
    columns = {"photo": photo or [photo_column(file, rows, others, root)], "captions": captions}
    columns["tags"] = [name for name in tags if name not in marks]
    columns["split"] = [key for key in keys if column_name(key) == "split"]
    columns["tags where 1"] = marks
    columns["not used"] = sorted({*keys}.difference(*columns.values()))
    taken = [f"{what}: {short(', '.join(names))}" for what, names in columns.items() if names]
    print_main(f"{file}: {'; '.join(taken)}")
    return columns


def photo_column(file, rows, keys, root):
    """The column of which nearly all rows name a photo, by its path before by its stem"""
    found = []
    for key in [key for key in keys if not WORDS.search(column_name(key))]:
        names = [name_of(row, key) for row in rows]
        places, by_path = find_photos(root, names)
        photos = [places[name] for name in names]
        share = sum(map(bool, photos)) / len(rows)
        are_numbers = all(name.isdigit() for name in names if name)  # ages or prices, say
        if share and (NAMES.search(column_name(key)) or not are_numbers):
            found.append((share >= 0.9, by_path, share, key, photos))
    if not found:
        fail(f"{root} holds no photo of {file}, such as {short(rows[0])}: see --root")
    nearly, by_path, share, best, photos = max(found)
    for nearly_too, path_too, share_too, key, others in found:
        as_good = path_too > by_path or (nearly_too, path_too) == (nearly, by_path)
        differ = any(one and other and one != other for one, other in zip(photos, others))
        if differ and as_good and share_too >= 0.5:
            fail(f"{file}: which column names the photo, {best} or {key}? Give --image-column")
    if share < 0.5:
        fail(f"{file}: only {share:.0%} of {best} name a photo below {root}: see --image-column")
    return best


def find_marks(file, rows, columns):
    """-> columns that say yes or no, whose cells become [name], [] or None (not known)"""
    values = {name: {lower(row.get(name)) for row in rows}.difference(NOTHING) for name in columns}
    marks = []
    for name, found in values.items():
        odd = sorted(found.difference(YES, NO))
        alike = len(odd) <= 2 and list(values.values()).count(found) > 1  # ja and nein, say
        if found and (not odd or len(found) == 1 and odd[0] in MARKS):
            marks.append(name)
        elif odd and (len(odd) < len(found) or alike or all(map(NUMBER.fullmatch, odd))):
            fail(f"{file}: {name} holds {short(odd[0])}: 0 and 1 are expected, or yes and no")
    for name in marks:
        empty = None if values[name] & {*NO} else []  # beside marks alone, an empty cell is a no
        meaning = dict.fromkeys(NO, []) | dict.fromkeys(NOTHING, empty)
        for row in rows:
            row[name] = meaning.get(lower(row.get(name)), [name])
    return marks


def lower(cell):
    return "" if cell is None else str(cell).strip().lower()


def gather(rows, root, columns, split, photos, notes):
    """Add the rows to {path of a photo: {"image", "captions", "tags", "split"}}."""
    names = [name_of(row, columns["photo"][0]) for row in rows]
    places, _ = find_photos(root, names)
    earlier = {photo["image"] for photo in photos.values()}  # of other files
    for name, paths in places.items():
        if name and not paths:
            notes["missing photos"].append(os.path.join(root, name))
        elif len(paths) > 1:
            notes["names of several photos, or several names of one"].append([name, *paths])
        elif paths and paths[0] != os.path.join(root, name):
            notes["photos looked up by name"].append([name, paths[0]])
    separators = {}
    for column in columns["tags"]:  # the first of | ; and , that the column holds
        texts = "".join(clean(lower(row.get(column))) for row in rows)
        separators[column] = next((mark for mark in "|;" if mark in texts), ",")
    separators |= dict.fromkeys(columns["tags where 1"])  # None
    for row, name in zip(rows, names):
        captions = captions_of(row, columns["captions"], notes)
        tags = tags_of(row, separators, notes)
        if not name:
            notes["rows without a photo"].append(row)
        if len(places[name]) != 1:
            continue
        [path] = places[name]
        photo = photos.setdefault(os.path.realpath(path), {"image": path, "captions": []})
        if photo["captions"] and not os.path.exists(os.path.join(root, name)) and path in earlier:
            notes["photos that two files name, neither by their path"].append([name, path])
        notes["repeated captions"] += [text for text in captions if text in photo["captions"]]
        photo["captions"] = list(dict.fromkeys(photo["captions"] + captions))
        if tags is not None:
            photo["tags"] = list(dict.fromkeys(photo.get("tags", []) + tags))
        value = lower(split or next((row.get(key) for key in columns["split"]), ""))
        value = SPLITS.get(value, value)
        if value not in NOTHING and photo.setdefault("split", value) != value:
            notes["rows in another split than their photo's first"].append(row)


def name_of(row, column):
    """-> the path of a photo as the row has it; "" if there is none"""
    name = "" if lower(row.get(column)) in NOTHING else str(row[column]).strip()
    return name and os.path.normpath(name.replace("\\", "/"))


def texts_in(row, column):
    """The values in a cell: those of its list, or one"""
    value = row.get(column)
    if isinstance(value, str) and re.match(r"\s*\[\s*['\"].*\]\s*$", value, re.S):
        fail(f"{column} holds a list as text, {short(value)}: write the rows as JSON")
    return value if isinstance(value, list) else [value]


def captions_of(row, columns, notes):
    captions = []
    for text in [text for name in columns if name in row for text in texts_in(row, name)]:
        text = text.get("raw") if isinstance(text, dict) else text  # Karpathy's
        text = clean(text) if isinstance(text, str) else ""
        if lower(text) in NOTHING or not any(map(str.isalpha, text)):
            notes["captions without a letter"].append(row)
        else:
            captions.append(text)
    return captions


def tags_of(row, separators, notes):
    """-> a list of strings; None if the row says nothing about them"""
    tags = []
    marks = [row[name] for name, separator in separators.items() if separator is None]
    if None in marks and any(marks):
        notes["empty cells beside 0 and 1, which count as 0"].append(row)
    for name, separator in separators.items():
        for value in texts_in(row, name):
            if isinstance(value, str):
                tags += clean(value).split(separator) if value is row[name] else [value]
            elif value is not None:
                notes["tags that are no text"].append(value)
    tags = [clean(tag) for tag in tags if lower(clean(tag)) not in NOTHING]
    return tags if tags or [] in [row.get(name) for name in separators] else None


def clean(text):
    """Without HTML's tags, and its entities, which the web often escapes twice"""
    return common.one_line(HTML_TAG.sub(" ", html.unescape(html.unescape(text))))


def find_photos(root, names):
    """-> {name: paths}: none, one, or several below the root; was any found by its path?"""
    by_path, by_stem = photos_below(root)
    places, sharing = {}, defaultdict(set)  # {stem: names}
    for name in names:
        path = os.path.join(root, name)
        is_there = ENDING.search(name) and os.path.isfile(path)
        places[name] = [path] if is_there else by_path.get(plain(name), [])
        sharing[stem(name)].add(plain(name))
    if any(places.values()):
        return places, True  # the stem would replace a missing photo by its mask
    for name in places:
        others = sharing[stem(name)] - {plain(name)}
        paths = by_stem.get(stem(name), [])
        places[name] = paths + list(others) if paths else []
    return places, False


def plain(name):
    """Composed (é is one character), in lower case"""
    return unicodedata.normalize("NFC", name).lower()


def stem(name):
    return ENDING.sub("", plain(os.path.basename(name)))


@cache
def photos_below(root):
    """-> {end of a path: paths}, of a/b/1.jpg a/b/1.jpg, b/1.jpg and 1.jpg; {stem: paths}"""
    by_path, by_stem = defaultdict(list), defaultdict(list)
    for path in common.list_photos(root):
        parts = plain(os.path.relpath(path, root)).split("/")
        by_stem[stem(path)].append(path)
        for n in range(len(parts)):
            by_path["/".join(parts[n:])].append(path)
    return by_path, by_stem


def write(output, rows, notes):
    """Write the lines; print counts of what they hold and of what was left out."""
    splits = Counter(row.get("split", "no split") for row in rows)
    counts = {f"photos ({split})": splits[split] for split in splits}
    counts["captions"] = sum(len(row["captions"]) for row in rows)
    counts["tags"] = sum(len(row.get("tags", [])) for row in rows)
    for row in rows:
        row["image"] = os.path.relpath(row["image"], output.parent)
        if splits.keys() <= {"train", "no split"}:  # without any split, some will be held out
            row.pop("split", None)
    notes["photos without a caption"] = [row["image"] for row in rows if not row["captions"]]
    for what, examples in notes.items():
        if examples:
            counts[f"{what}, the first: {short(examples[0])}"] = len(examples)
    print_main("\n".join(f"{count:7d} {what}" for what, count in counts.items()))
    if not counts["captions"] and not counts["tags"]:
        fail(f"no caption is left: {output} is not written")
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    output.write_bytes("".join(lines).encode(errors="replace"))
    print_main(f"the first line: {lines[0]}use it with --data {output}")


if __name__ == "__main__":
    main(get_args())
