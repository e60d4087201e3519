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

IMAGES = "image", "file_name", "filepath", "filename"  # columns that need no flag
CAPTIONS = "captions", "caption", "text", "title", "sentences"
SPLITS = {"train": "train", "training": "train", "restval": "train", "test": "test",
          "val": "val", "valid": "val", "validation": "val", "dev": "val"}
ROW = '{"image": "1.jpg", "captions": ["a dog"]}'  # what messages show
TEXT_ENDINGS = ".txt", ".caption"  # beside KEY.jpg; the second is kohya's
YES, NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "")
NO_WORDS = "na", "n/a", "#n/a", "<na>", "nan", "none", "null"
LIST_AS_TEXT = re.compile(
    r"""(?s)\[\s*['"[({].*\]|\{\s*['"].*\}|\(\s*(['"]).*\1\s*,.*\)|array\(.*\)"""
)

# Copied from extras/folders.py, whose torch would take 0.5 GB and five seconds.
PHOTO_ENDINGS = ".jpg .jpeg .jpe .jfif .mpo .png .webp .avif .gif .bmp .tif .tiff .jp2 .ppm .pgm"
PHOTO_ENDINGS = tuple(PHOTO_ENDINGS.split())
ADDED_FOLDERS = "@eaDir #recycle @Recycle #snapshot $RECYCLE.BIN lost+found __MACOSX".split()
# <b>, </b>, <br/> or <a href="...">, but not "<b and c>" of "a<b and c>d"
HTML_NAMES = "p|br|b|i|u|em|strong|div|span|a|ul|ol|li|font|h[1-6]"
HTML_TAG = re.compile(rf"(?i)</?({HTML_NAMES})(\s+[\w:-]+=[^<>]*|\s*/)?>")


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
        f"path (default: {', '.join(IMAGES)})")
    add("--captions", **columns,
        help=f"columns with a caption or a list of them (default: {', '.join(CAPTIONS)})")
    add("--tags", **columns, help="columns with a tag or a list of them")
    add("--separator", help="what stands between several tags in one cell, such as ,")
    add("--tags-if-1", **columns, help="columns with 1 and 0, whose names are the tags")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--split", nargs=1, metavar="COLUMN", default=[],
           help="column that says train, val... (default: split)")
    either("--split-name", metavar="NAME", default="", help="the split of all rows")
    add("--ending", default="", help="what to append to the paths, such as .jpg")
    add("--root", help="the folder from which paths start (default: that of each FILE)")
    add("--output", default="photos.jsonl", help="file to write (default: photos.jsonl in the "
        "current folder); an existing one is replaced")
    return parser.parse_args(argv)


def fail(message):
    sys.exit(f"error: {message}")


def main(args):
    output = Path(os.path.abspath(args.output))
    files = [file for given in args.files for file in files_of(Path(os.path.abspath(given)))]
    if output.suffix != ".jsonl" or output.is_dir() or output in files:
        fail(f"--output {output} must end in .jsonl, and be neither a folder nor the input file")
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
    if not path.exists():
        fail(f"there is no {path}")
    if path.suffix.lower() not in READERS:
        fail(f"{path} must end in {', '.join(READERS)} (tools/make_shards.py reads tar files)")
    return [path]


def add_rows(file, args, several, output_folder, photos, notes):
    """Add the rows of a file to photos, {real path: {"image", "captions", "tags", "split"}}."""
    names, rows = read_folder(file) if file.is_dir() else READERS[file.suffix.lower()](file)
    columns = choose_columns(file, names, args)
    folder = file if file.is_dir() else file.parent
    split = args.split_name
    if several and not split and not columns["split"]:
        if folder.name.lower() not in SPLITS:
            fail(f"{file} has no column split, and its folder is not named train, val or test: "
                 "give --split COLUMN, or convert the files of each split with --split-name NAME")
        split = folder.name
        print(f"{file}: split: {split}, the name of its folder")
    root = os.path.abspath(args.root or folder)
    for place, row in rows:
        where = f"{file}, {place}"
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
        if args.tags or args.tags_if_1:
            tags = texts_of(row, args.tags, "tags", where, notes, args.separator)
            tags += [name for name in args.tags_if_1 if is_1(row.get(name), name, where, notes)]
            # An empty cell does not say whether a tag fits, but an empty list does.
            if tags or args.tags_if_1 or [] in [row.get(name) for name in args.tags]:
                photo["tags"] = list(dict.fromkeys(photo.get("tags", []) + tags))
        if columns["split"]:
            split = as_text(row.get(columns["split"][0]))
        name = SPLITS.get(split.lower(), split)
        if name and photo.setdefault("split", name) != name:
            notes["rows in another split than their photo's first"].append(f"{path}, {name}")


# ----------------------------- files -> names of columns, (place in the file, {name: cell}) of rows


def read_text(path):
    """-> the text of a UTF-8 file, with lines that end with \\n"""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        fail(f"{path}, line {line}, is not UTF-8 text: save it as such")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_csv(path):
    text = read_text(path).lstrip("\n")
    header = text.split("\n")[0]
    mark = max(",\t;|", key=header.count)
    form = {"delimiter": mark, "skipinitialspace": mark in ",;", "strict": True}
    reader, lines, number = csv.reader(io.StringIO(text), **form), [], 0
    try:
        for cells in reader:
            first, number = number + 1, reader.line_num
            # If a quote is not closed, its cell holds the separators of at least one row.
            if any("\n" in cell and cell.count(mark) >= header.count(mark) for cell in cells):
                fail(f"{path}: a quote joins the lines {first} to {number}, {short(cells)}. If it "
                     "is not closed, close it; if the text has several lines, write the table as "
                     ".xlsx or .jsonl")
            lines.append((number, cells))
    except csv.Error as error:
        fail(f"{path}, after line {number}: {error}: quotes must be those of csv")
    return named_rows(path, "line", lines)


def read_excel(path):
    """The first sheet, and values instead of formulas"""
    try:
        import openpyxl
    except ModuleNotFoundError:
        fail("openpyxl is missing: python -m pip install openpyxl")
    sheet, *others = openpyxl.load_workbook(path, data_only=True).worksheets
    if others:
        print(f"{path}: read the sheet {sheet.title}, not {[x.title for x in others]}")
    rows = enumerate(sheet.iter_rows(), 1)
    return named_rows(path, "row", [(number, list(map(shown, cells))) for number, cells in rows])


def shown(cell):
    """Of Excel, as text: a 7 whose format is 0000 is shown as 0007"""
    is_padded = isinstance(cell.value, int) and {*cell.number_format} == {"0"}
    return as_text(cell.value).zfill(len(cell.number_format) if is_padded else 0)


def named_rows(path, unit, lines):
    """lines: [(number, cells)], of which the first one names the columns.  unit: line or row"""
    lines = [(number, cells) for number, cells in lines if any(map(str.strip, cells))]
    if len(lines) < 2:
        fail(f"{path} has no rows below the names of its columns")
    names = [cell.strip() for cell in lines[0][1]]
    while not names[-1]:  # as Excel may write
        names.pop()
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        fail(f"{path} has two columns named {repeated[0]!r}: rename one")
    for number, cells in lines:
        if len(cells) < len(names) or any(map(str.strip, cells[len(names) :])):
            fail(f"{path}, {unit} {number}, has {len(cells)} cells, but {len(names)} columns are "
                 f"named: {short(cells)}. A text that holds the separator needs quotes")
    return names, [(f"{unit} {number}", dict(zip(names, cells))) for number, cells in lines[1:]]


def read_parquet(path):
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        fail("pyarrow is missing: python -m pip install pyarrow")
    # By default all photos of a row group would be in memory at once.
    file = parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
    rows = (row for batch in file.iter_batches(16) for row in batch.to_pylist())
    return file.schema_arrow.names, ((f"row {n}", row) for n, row in enumerate(rows, 1))


def read_json(path):
    """A list of rows, a row on each line, or an object with rows. Numbers are texts as written."""
    text, rows, end = read_text(path).rstrip(), [], 0
    numbers = {"parse_int": str, "parse_float": str, "parse_constant": lambda nan: None}
    decoder = json.JSONDecoder(object_pairs_hook=without_repeats, **numbers)
    try:
        while end < len(text):
            start = re.compile(r"\s*").match(text, end).end()
            row, end = decoder.raw_decode(text, start)
            rows.append(row)
    except ValueError as error:
        fail(f"{path} is not valid JSON: {error}")
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    elif len(rows) == 1 and isinstance(rows[0], dict) and path.suffix.lower() == ".json":
        rows = rows_within(path, rows[0])
    if not rows or not all(row and isinstance(row, dict) for row in rows):
        fail(f"{path} has no rows such as {ROW}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return names, [(f"row {n}", row) for n, row in enumerate(rows, 1)]


def without_repeats(pairs):
    """Of a JSON object, of which Python would keep the last value of a key"""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"an object has a key twice: {short(pairs)}")
    return content


def rows_within(path, content):
    """The one list of rows in an object, such as Karpathy's "images"; or COCO's two lists"""
    lists = {name: part for name, part in content.items()
             if isinstance(part, list) and part and isinstance(part[0], dict)}
    coco = ["images", "annotations"]
    read = coco if {*coco} <= lists.keys() else [*lists]
    if content.keys() & {*IMAGES} or len(read) != 1 and read != coco:
        fail(f"{path} is one object, with {short(', '.join(content))}: write a list of rows such "
             f"as [{ROW}, ...]")
    unread = [name for name in content if name not in read]
    print(f"{path}: read {' and '.join(read)}; not used: {short(', '.join(unread))}")
    if read != coco:
        return lists[read[0]]
    files = {None: None}
    for image in lists["images"]:
        name = image.get("file_name")
        if files.setdefault(image.get("id"), name) != name:
            fail(f"{path}: the image {name} has no id, or that of another image")
    rows = [{**row, "file_name": files.get(row.get("image_id"))} for row in lists["annotations"]]
    return lists["images"] + rows


def read_folder(folder):
    """KEY.jpg, and beside it KEY.txt or KEY.caption with a caption on each line"""
    keys, rows = defaultdict(lambda: ([], [])), []  # {key: (photos, texts)}
    added = []
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
             "file that holds the captions, or put the texts beside the photos")
    for photos, texts in keys.values():
        if len(texts) > 1 or texts and len(photos) > 1:
            fail(f"which text is of which photo? {', '.join(photos + texts)}: keep one of each")
        lines = read_text(Path(texts[0])).split("\n") if texts else []
        captions = list(filter(str.strip, lines))
        rows += [(path, {"image": path, "captions": captions}) for path in photos or texts]
    several = [path for path, row in rows if len(row["captions"]) > 1]
    if several:
        print(f"{folder}: {len(several)} photos have a text of several lines, each of which is a "
              f"caption, the first: {several[0]}")
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
    usual = {"image": IMAGES, "captions": CAPTIONS, "split": () if args.split_name else ("split",)}
    for what in [what for what in usual if not columns[what]]:
        found = [name for name in names if name.lower() in usual[what] and name not in named]
        if sorted(found) == ["filename", "filepath"] and "sentences" in names:
            columns[what] = ["filepath", "filename"]  # Karpathy's
        elif len(found) == 1 or not found and (what == "split" or what == "captions" and tags):
            columns[what] = found
        else:
            fail(f"{file}: give --{what} COLUMN, one of {short(', '.join(names))} (of the usual "
                 f"{', '.join(usual[what])} it has {' and '.join(found) or 'none'}; the first line "
                 "of a table names its columns)")
    used = sum(columns.values(), [])
    columns["not used"] = [name for name in names if name and name not in used]
    taken = [f"{what}: {short(', '.join(found))}" for what, found in columns.items() if found]
    print(f"{file}: {'; '.join(taken)}")
    return columns


def photo_path(cells, root, ending, output_folder, where):
    """-> the path of a photo, or ""; one inside the table becomes a file beside the output"""
    cell = cells[0] if len(cells) == 1 else "/".join(filter(None, map(as_text, cells)))
    if isinstance(cell, list) and len(cell) == 1:
        cell = cell[0]
    if isinstance(cell, dict):  # Hugging Face's
        cell = cell.get("bytes") or cell.get("path", cell)
    if isinstance(cell, bytes):
        # Named by its content, it never overwrites another photo. PIL looks at the content, too.
        name = f"{hashlib.sha256(cell).hexdigest()[:32]}.jpg"
        path = output_folder / "parquet-photos" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(cell)
        return str(path)
    name = as_text(cell)
    if isinstance(cell, dict | list) or LIST_AS_TEXT.fullmatch(name):
        fail(f"{where}: {short(cell)} is not the path of one photo: write a row for each photo")
    return name and os.path.normpath(os.path.join(root, name.replace("\\", "/") + ending))


def texts_of(row, columns, what, where, notes, separator=None):
    """-> the texts in these cells, on one line each, without HTML"""
    texts = []
    for column in columns:
        cell = row.get(column)
        if separator and isinstance(cell, str):
            cell = cell.split(separator)
        for written in texts_in(cell, f"{where}: {column}"):
            written = html.unescape(html.unescape(written))  # the web often escapes twice
            text = " ".join(HTML_TAG.sub(" ", written).split())
            if HTML_TAG.search(written):
                notes[f"{what} that lost HTML"].append(written)
            if "\n" in written.strip():
                notes[f"{what} with line breaks, now spaces"].append(written)
            if not text:
                notes[f"empty {what}, left out"].append(where)
                continue
            if text.lower() in NO_WORDS or not any(map(str.isalpha, text)):
                notes[f"{what} without a word (NA, nan, None, null...), kept"].append(text)
            texts.append(text)
    return texts


def texts_in(cell, where):
    """-> the texts in a cell: of a list, of Karpathy's sentences, of a conversation's answers"""
    if isinstance(cell, list):
        return [text for item in cell for text in texts_in(item, where)]
    if isinstance(cell, dict):
        speaker = as_text(cell.get("from", cell.get("role"))).lower()
        if speaker in ("human", "user", "system"):
            return []
        if speaker in ("", "gpt", "assistant"):
            cell = cell.get("raw", cell.get("value", cell.get("content", cell)))
    if isinstance(cell, dict | list | bytes) or LIST_AS_TEXT.fullmatch(as_text(cell)):
        fail(f"{where} holds {short(cell)}: write texts, and lists of texts in a .json")
    return [] if cell is None else [str(cell)]


def is_1(cell, name, where, notes):
    text = as_text(cell).lower()
    if text not in YES + NO:
        fail(f"{where}: --tags-if-1 {name} needs 1 or 0 (true, false, yes, no), not {short(cell)}")
    if not text:
        notes["empty cells of --tags-if-1, which count as 0"].append(f"{where}: {name}")
    return text in YES


def as_text(cell):
    return "" if cell is None else str(cell).strip()


def short(value):
    return " ".join(str(value).split())[:150]


def write(output, photos, args, notes):
    """Write the lines; print counts of what they hold and of what is left out or doubtful."""
    if not photos:
        fail(f"no row has a photo; that of the first is {notes['rows without a photo'][:1]}: cells "
             "of --image must be paths that start from --root; --ending .jpg adds an ending")
    folders = {os.path.dirname(photo["image"]).lower() for photo in photos}
    parts = [set(folder.split("/")) for folder in folders]
    mixed = SPLITS.keys() & (set.union(*parts) - set.intersection(*parts))
    if len(mixed) > 1 and not args.split_name and not any("split" in photo for photo in photos):
        fail(f"photos are in folders {' and '.join(sorted(mixed))}, but no column says their split:"
             " give --split COLUMN; or --split-name train, of which one in twenty is held out; or "
             "FOLDER/train FOLDER/val instead of a FOLDER of KEY.txt")
    splits = Counter(photo.get("split", "no split") for photo in photos)
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
    letters = (letter for photo in photos for letter in "".join(photo["captions"]))
    if not any(map(str.isalpha, letters)) and not tags:
        fail(f"no caption has a word (see --captions): {output} is not written")
    for photo in photos:
        photo["image"] = os.path.relpath(photo["image"], output.parent)
    lines = [json.dumps(photo, ensure_ascii=False) + "\n" for photo in photos]
    temporary = Path(f"{output}.tmp")
    try:
        temporary.write_text("".join(lines), encoding="utf-8", errors="replace")
        temporary.replace(output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        fail(f"{output} cannot be written ({error.strerror})")
    print(f"the first line: {lines[0]}use it with --data {output}")


if __name__ == "__main__":
    main(get_args())
