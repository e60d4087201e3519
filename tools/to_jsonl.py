"""Convert captions of other projects to our photos.jsonl: you name the columns

    python tools/to_jsonl.py captions.csv --image file --captions text --root photos
    python tools/to_jsonl.py train.parquet    # photos inside become files beside the output
    python tools/to_jsonl.py FOLDER           # with metadata.csv, or of KEY.jpg and KEY.txt

It reads tables (.csv, .tsv, .txt, .xlsx, .parquet), rows of JSON (.json, .jsonl), and COCO's and
Karpathy's files. Cells are texts as written. What could be read in two ways is refused with the
flag to give, and what is left out or doubtful is counted (see docs/running.md).
"""

import argparse
import csv
import glob
import hashlib
import html
import io
import json
import os
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

USUAL = {  # columns that need no flag
    "image": ("image", "file_name", "filepath", "filename"),
    "captions": ("captions", "caption", "text", "title", "sentences"),
    "split": ("split",),
}
SPLITS = {"train": "train", "training": "train", "restval": "train", "test": "test",
          "val": "val", "valid": "val", "validation": "val", "dev": "val"}
TEXT_ENDINGS = ".txt", ".caption"  # beside KEY.jpg; the second is kohya's
# Of an object: a photo of Hugging Face, a sentence of Karpathy, a turn of a conversation
INSIDE = "bytes", "path", "raw", "value", "content"
YES, NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "")
NO_WORDS = "na", "n/a", "#n/a", "<na>", "nan", "none", "null"
LIST_AS_TEXT = re.compile(r"""(?s)[\[{]\s*['"\[{].*[\]}]""")  # as pandas writes lists into a .csv
SPACE = re.compile(r"\s*")
# <b>, </b>, <br/> or <a href="...">, but not "<b and c>" of "a<b and c>d"
HTML_NAMES = "p|br|b|i|u|em|strong|div|span|a|ul|ol|li|font|h[1-6]"
HTML_TAG = re.compile(rf"(?i)</?({HTML_NAMES})(\s+[\w:-]+=[^<>]*|\s*/)?>")

# Copied from extras/folders.py, whose torch would take 0.5 GB and five seconds.
PHOTO_ENDINGS = ".jpg .jpeg .jpe .jfif .mpo .png .webp .avif .gif .bmp .tif .tiff .jp2 .ppm .pgm"
PHOTO_ENDINGS = tuple(PHOTO_ENDINGS.split())
ADDED_FOLDERS = "@eaDir #recycle @Recycle #snapshot $RECYCLE.BIN lost+found __MACOSX".split()


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=layout, allow_abbrev=False
    )
    parser.error = fail  # in one line, without usage
    add = parser.add_argument
    columns = {"nargs": "+", "metavar": "COLUMN", "default": []}
    add("files", nargs="+", metavar="FILE", help="a file with captions, or a folder")
    add("--image", **columns, help="column with the photo or its path; several are parts of the "
        f"path (default: {', '.join(USUAL['image'])})")
    add("--captions", **columns,
        help=f"columns with a caption or a list of them (default: {', '.join(USUAL['captions'])})")
    add("--tags", **columns, help="columns with a tag or a list of them")
    add("--separator", help="what stands between several tags in one cell, such as ,")
    add("--tags-if-1", **columns, help="columns with 1 and 0, whose names are the tags")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--split", nargs=1, metavar="COLUMN", default=[],
           help="column that says train, val... (default: split)")
    either("--split-name", metavar="NAME", default="", help="the split of all rows")
    add("--ending", default="", help="what to append to the paths, such as .jpg")
    add("--root", help="the folder from which paths start (default: that of each FILE)")
    add("--output", default="photos.jsonl", help=".jsonl to write; an existing one is replaced")
    return parser.parse_args(argv)


def fail(message):
    sys.exit(f"error: {message}")


def main(args):
    output = Path(os.path.abspath(args.output))
    files = [file for given in args.files for file in files_of(Path(os.path.abspath(given)))]
    if output.suffix != ".jsonl" or output in files:
        fail(f"--output {output} must end in .jsonl, and must not be the input file")
    output.parent.mkdir(parents=True, exist_ok=True)
    photos, notes = {}, defaultdict(list)  # notes: {what is left out or doubtful: examples}
    for file in files:
        add_rows(file, args, len(files) > 1, output.parent, photos, notes)
    write(output, list(photos.values()), args, notes)


def files_of(path):
    """A file -> [itself]; a folder -> its files of Hugging Face's imagefolder, or [itself]"""
    if path.is_dir():
        found = sorted([*path.glob("metadata.*"), *path.glob("*/metadata.*")])
        return [file for file in found if file.suffix in (".csv", ".jsonl", ".parquet")
                and (file.parent == path or file.parent.name.lower() in SPLITS)] or [path]
    if not path.exists() or path.suffix.lower() not in READERS:
        fail(f"{path} must exist, and end in {', '.join(READERS)} (tar files: make_shards.py)")
    return [path]


def add_rows(file, args, several, output_folder, photos, notes):
    """Add the rows of a file to photos, {real path: {"image", "captions", "tags", "split"}}."""
    folder = file if file.is_dir() else file.parent
    try:
        names, rows = READERS[file.suffix.lower()](file) if file != folder else read_folder(file)
    except ModuleNotFoundError as error:
        fail(f"{error.name} is missing: python -m pip install {error.name}")
    columns = choose_columns(file, names, args)
    split = args.split_name
    if several and not split and not columns["split"]:
        split = folder.name
        if split.lower() not in SPLITS:
            fail(f"{file} has no column split, and its folder is not named train, val or test: "
                 "give --split COLUMN, or --split-name NAME for the files of each split")
        print(f"{file}: split: {split}, the name of its folder")
    root = os.path.abspath(args.root or folder)
    for number, row in enumerate(rows, 1):
        where = f"{file}, row {number}"
        cells = [row.get(name) for name in columns["image"]]
        path = photo_path(cells, root, args.ending, output_folder, where)
        if not path.lower().endswith(PHOTO_ENDINGS) or not os.path.isfile(path):
            notes["rows without a photo"].append(path or where)
            continue
        photo = photos.setdefault(os.path.realpath(path), {"image": path, "captions": []})
        for text in texts_of(row, columns["captions"], "captions", where, notes):
            if text in photo["captions"]:
                notes["repeated captions"].append(text)
            else:
                photo["captions"].append(text)
        tags = texts_of(row, args.tags, "tags", where, notes, args.separator)
        for name in args.tags_if_1:
            cell = as_text(row.get(name)).lower()
            if cell not in YES + NO:
                fail(f"{where}: --tags-if-1 {name} needs 1 or 0 (true, false, yes, no), not {cell}")
            if not cell:
                notes["empty cells of --tags-if-1, which count as 0"].append(f"{where}: {name}")
            tags += [name] if cell in YES else []
        # An empty cell does not say whether a tag fits, but an empty list does.
        if tags or args.tags_if_1 or [] in [row.get(name) for name in args.tags]:
            photo["tags"] = list(dict.fromkeys(photo.get("tags", []) + tags))
        if columns["split"]:
            split = as_text(row.get(columns["split"][0]))
        name = SPLITS.get(split.lower(), split)
        if name and photo.setdefault("split", name) != name:
            notes["rows in another split than their photo's first"].append(f"{path}, {name}")


# ------------------------------------------------- files -> names of columns, {name: cell} of rows


def read_text(path):
    """-> the text of a UTF-8 file, with lines that end with \\n"""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{path} is not UTF-8 text, save it as such: {error}")


def read_csv(path):
    text = read_text(path).lstrip("\n")
    header = text.split("\n")[0]
    mark = max(",\t;|", key=header.count)
    form = {"delimiter": mark, "skipinitialspace": mark in ",;", "strict": True}
    reader, table, end = csv.reader(io.StringIO(text), **form), [], 0
    try:
        for cells in reader:
            start, end = end + 1, reader.line_num
            # If a quote is not closed, its cell holds the separators of at least one row.
            if any("\n" in cell and cell.count(mark) >= header.count(mark) for cell in cells):
                fail(f"{path}: a quote joins the lines {start} to {end}: close it, or write texts "
                     f"of several lines as .xlsx or .jsonl: {short(cells)}")
            table.append(cells)
    except csv.Error as error:
        fail(f"{path}, after line {end}: {error}: quotes must be those of csv")
    return named_rows(path, table)


def read_excel(path):
    """The first sheet, and values instead of formulas"""
    import openpyxl

    sheet, *others = openpyxl.load_workbook(path, data_only=True).worksheets
    if others:
        print(f"{path}: read the sheet {sheet.title}, not {[x.title for x in others]}")
    return named_rows(path, [list(map(shown, cells)) for cells in sheet.iter_rows()])


def shown(cell):
    """Of Excel, as text: a 7 whose format is 0000 is shown as 0007"""
    is_padded = isinstance(cell.value, int) and {*cell.number_format} == {"0"}
    return as_text(cell.value).zfill(len(cell.number_format) if is_padded else 0)


def named_rows(path, table):
    """table: lists of texts, of which the first one names the columns"""
    table = [cells for cells in table if any(map(str.strip, cells))]
    if len(table) < 2:
        fail(f"{path} has no rows below the names of its columns")
    names = [cell.strip() for cell in table[0]]
    while not names[-1]:  # as Excel may write
        names.pop()
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        fail(f"{path} has two columns named {repeated[0]!r}: rename one")
    for number, cells in enumerate(table):
        if len(cells) < len(names) or any(map(str.strip, cells[len(names) :])):
            fail(f"{path}, row {number}, has {len(cells)} cells, but {len(names)} columns are "
                 f"named: {short(cells)}. A text that holds the separator needs quotes")
    return names, [dict(zip(names, cells)) for cells in table[1:]]


def read_parquet(path):
    from pyarrow import parquet

    # By default all photos of a row group would be in memory at once.
    file = parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
    return file.schema_arrow.names, (
        row for batch in file.iter_batches(16) for row in batch.to_pylist()
    )


def read_json(path):
    """A list of rows, a row on each line, or an object with rows. Numbers are texts as written."""
    decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=lambda nan: None)
    text, rows, end = read_text(path).strip(), [], 0
    try:
        while end < len(text):
            row, end = decoder.raw_decode(text, end)
            rows.append(row)
            end = SPACE.match(text, end).end()
    except json.JSONDecodeError as error:
        fail(f"{path} is not valid JSON: {error}")
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    elif len(rows) == 1 and isinstance(rows[0], dict) and path.suffix.lower() == ".json":
        rows = rows_within(path, rows[0])
    if not all(isinstance(row, dict) for row in rows):
        fail(f'{path} has no rows such as {{"image": "1.jpg", "captions": ["a dog"]}}')
    return list(dict.fromkeys(name for row in rows for name in row)), rows


def rows_within(path, content):
    """The one list of rows in an object, such as Karpathy's "images"; or COCO's two lists"""
    lists = {name: part for name, part in content.items()
             if isinstance(part, list) and part and isinstance(part[0], dict)}
    is_coco = {"images", "annotations"} <= lists.keys()
    read = ["images", "annotations"] if is_coco else [*lists]
    if len(read) != 1 and not is_coco:
        fail(f"{path} is one object, with {short(', '.join(content))}: write a list of rows")
    unread = [name for name in content if name not in read]
    print(f"{path}: read {' and '.join(read)}; not used: {short(', '.join(unread))}")
    if not is_coco:
        return lists[read[0]]
    files = {}
    for image in lists["images"]:
        name = image.get("file_name")
        if files.setdefault(image.get("id"), name) != name:
            fail(f"{path}: the image {name} has no id, or that of another image")
    rows = [{**row, "file_name": files.get(row.get("image_id"))} for row in lists["annotations"]]
    return lists["images"] + rows


def read_folder(folder):
    """KEY.jpg, and beside it KEY.txt or KEY.caption with a caption on each line"""
    keys, added, rows = defaultdict(lambda: ([], [])), [], []  # {key: (photos, texts)}
    for name in sorted(glob.glob("**", root_dir=folder, recursive=True)):  # none that is hidden
        path = os.path.join(folder, name)
        key, ending = os.path.splitext(path)
        if not {*ADDED_FOLDERS}.isdisjoint(name.split(os.sep)):
            added.append(path)
        elif ending.lower() in TEXT_ENDINGS + PHOTO_ENDINGS:
            keys[key][ending.lower() in TEXT_ENDINGS].append(path)
    if added:
        print(f"{folder}: {len(added)} files and folders are left out, which a file system or an "
              f"archiver has added, the first: {added[0]}")
    if not any(photos and texts for photos, texts in keys.values()):
        fail(f"{folder} has neither metadata.csv or .jsonl nor KEY.txt beside KEY.jpg: name the "
             "file that holds the captions")
    for photos, texts in keys.values():
        if len(texts) > 1 or texts and len(photos) > 1:
            fail(f"which text is of which photo? {', '.join(photos + texts)}: keep one of each")
        captions = read_text(Path(texts[0])).split("\n") if texts else []
        captions = list(filter(str.strip, captions))
        rows += [{"image": path, "captions": captions} for path in photos or texts]
    return ["image", "captions"], rows


READERS = {".csv": read_csv, ".tsv": read_csv, ".txt": read_csv, ".xlsx": read_excel,
           ".json": read_json, ".jsonl": read_json, ".parquet": read_parquet}


# ------------------------------------------------------------------------------- columns and cells


def choose_columns(file, names, args):
    """-> {"image", "captions", "tags", "split": names of columns}, which it prints"""
    tags = args.tags + args.tags_if_1
    columns = {"image": args.image, "captions": args.captions, "tags": tags, "split": args.split}
    named = sum(columns.values(), [])
    for name in named:
        if name not in names:
            fail(f"{file} has no column {name}, but {short(', '.join(names))}")
    for what, usual in USUAL.items():
        found = [name for name in names if name.lower() in usual and name not in named]
        may_lack = what == "split" or what == "captions" and tags
        if columns[what] or what == "split" and args.split_name:
            continue
        if sorted(found) == ["filename", "filepath"] and "sentences" in names:
            columns[what] = ["filepath", "filename"]  # Karpathy's
        elif len(found) == 1 or not found and may_lack:
            columns[what] = found
        else:
            fail(f"{file}: give --{what} COLUMN, one of {short(', '.join(names))}; of the usual "
                 f"{', '.join(usual)} its first line has {' and '.join(found) or 'none'}")
    used = sum(columns.values(), [])
    columns["not used"] = [name for name in names if name and name not in used]
    taken = [f"{what}: {short(', '.join(found))}" for what, found in columns.items() if found]
    print(f"{file}: {'; '.join(taken)}")
    return columns


def photo_path(cells, root, ending, output_folder, where):
    """-> the path of a photo, or ""; one inside the table becomes a file beside the output"""
    found = values_in(cells[0], where) if len(cells) == 1 else [os.path.join(*map(as_text, cells))]
    if len(found) > 1:
        fail(f"{where}: {short(found)} is not the path of one photo: write a row for each photo")
    photo = found[0] if found else ""
    if isinstance(photo, bytes):
        # Named by its content, it never overwrites another photo. PIL looks at the content, too.
        name = f"{hashlib.sha256(photo).hexdigest()[:32]}.jpg"
        path = output_folder / "parquet-photos" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(photo)
        return str(path)
    name = photo.strip().replace("\\", "/")
    return name and os.path.normpath(os.path.join(root, name + ending))


def texts_of(row, columns, what, where, notes, separator=None):
    """-> the texts in these cells, on one line each, without HTML; none is empty"""
    texts = []
    for column in columns:
        cell = row.get(column)
        if separator and isinstance(cell, str):
            cell = cell.split(separator)
        for written in values_in(cell, f"{where}: {column}"):
            text = without_html(written)
            if HTML_TAG.search(html.unescape(html.unescape(written))):
                notes[f"{what} that lost HTML"].append(written)
            if "\n" in written.strip():
                notes[f"{what} with line breaks, now spaces"].append(written)
            if text.lower() in NO_WORDS or text and not any(map(str.isalpha, text)):
                notes[f"{what} without a word (NA, nan, None, null...), kept"].append(text)
            texts.append(text)
    return list(filter(None, texts))


def without_html(text):
    """On one line, without HTML's tags, and its entities, which the web often escapes twice"""
    return " ".join(HTML_TAG.sub(" ", html.unescape(html.unescape(text))).split())


def values_in(cell, where):
    """-> what a cell holds: the items of a list, what INSIDE says of an object, or the cell itself

    Of a conversation, it is what the model says.
    """
    if isinstance(cell, list):
        return [value for item in cell for value in values_in(item, where)]
    if isinstance(cell, dict):
        speaker = as_text(cell.get("from", cell.get("role"))).lower()
        if speaker in ("human", "user", "system"):
            return []
        known = [cell[key] for key in INSIDE if key in cell]
        if known and speaker in ("", "gpt", "assistant"):
            cell = next(filter(None, known), None)
    if cell is None or isinstance(cell, bytes):
        return [cell] if cell else []
    if isinstance(cell, dict | list) or LIST_AS_TEXT.fullmatch(as_text(cell)):
        fail(f"{where} holds {short(cell)}: write texts, and lists of texts in a .json")
    return [str(cell)]


def as_text(cell):
    return "" if cell is None else str(cell).strip()


def short(value):
    return " ".join(str(value).split())[:150]


def write(output, photos, args, notes):
    """Write the lines; print counts of what they hold and of what is left out or doubtful."""
    if not photos:
        fail(f"no row has a photo; that of the first is {notes['rows without a photo'][:1]}: see "
             "--image, --root, and --ending, which appends .jpg, say")
    splits = Counter(photo.get("split", "no split") for photo in photos)
    folders = {os.path.dirname(photo["image"]) for photo in photos}
    inner = [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]
    mixed = SPLITS.keys() & {part for path in inner for part in path.lower().split("/")}
    if len(mixed) > 1 and not args.split_name and {*splits} == {"no split"}:
        fail(f"photos are in folders {' and '.join(sorted(mixed))}, but no column says their split:"
             " give --split COLUMN, or --split-name train, or the folders as several FILEs")
    if splits.keys() <= {"train", "no split"}:  # some will be held out
        splits = Counter({"no split": len(photos)})
        for photo in photos:
            photo.pop("split", None)
    tags = Counter(tag for photo in photos for tag in photo.get("tags", []))
    counts = {f"photos ({name})": number for name, number in splits.items()}
    counts["captions"] = sum(len(photo["captions"]) for photo in photos)
    counts["photos with known tags"] = sum("tags" in photo for photo in photos)
    counts[f"tags, {len(tags)} different ones: {short(', '.join(tags))}"] = tags.total()
    notes["photos without a caption"] = [x["image"] for x in photos if not x["captions"]]
    for what, examples in notes.items():
        counts[f"{what}, the first: {short(examples[:1])}"] = len(examples)
    print("\n".join(f"{number:7d} {what}" for what, number in counts.items() if number))
    if not counts["captions"] and not tags:
        fail(f"no caption is left: {output} is not written")
    for photo in photos:
        photo["image"] = os.path.relpath(photo["image"], output.parent)
    lines = [json.dumps(photo, ensure_ascii=False) + "\n" for photo in photos]
    output.write_text("".join(lines), encoding="utf-8", errors="replace")
    print(f"the first line: {lines[0]}use it with --data {output}")


if __name__ == "__main__":
    main(get_args())
