"""Convert captions of other projects to our photos.jsonl

    python tools/to_jsonl.py captions.csv --root photos --output photos.jsonl
    python tools/to_jsonl.py FOLDER    # with photos KEY.jpg and, in KEY.txt, a caption on each line

It reads .csv, .tsv, .json and .jsonl with a photo and its captions in each row, COCO's
captions_*.json and Karpathy's dataset_*.json. What is certain is read, what is not is refused with
the flag to give or the change to make, and what is left out is counted (see docs/running.md).
"""

import argparse
import csv
import io
import json
import os
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from functools import cache
from itertools import combinations
from pathlib import Path
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import fail, make_folder, print_main
from tools.make_shards import clean, has_html, without_repeats

CAPTIONS = re.compile(r"(captions?|sentences)_?\d*")  # names of columns; sentences: Karpathy's
WORDS = re.compile("caption|sentence|text|title|tag|label|class|categor|keyword")  # of no photo
NAMES = re.compile("image|img|photo|pic|file|path|key|name|(^|_)(id|no|nr|number)$")
IMAGES = re.compile("image|img|photo|pic|file|path")
SPLITS = dict(restval="train", training="train", validation="val", valid="val", dev="val")
NOTHING = "", *"[] nan none null n/a <na> #n/a #name? #ref! #value! #div/0! #num! #null!".split()
YES, NO = ("1", "1.0", "true", "yes", "y"), ("0", "0.0", "false", "no", "n")
MARKS = "x", "*", "+", "✓", "✔", "✗", "•", "●"
VOTES = """true yes y false no n x t f positive negative pos neg present absent ja nein nee oui non
    si sí sim não да нет tak nie evet hayır ya tidak 是 否 有 无 はい いいえ نعم لا हाँ नहीं ہاں نہیں
    wahr falsch richtig vrai faux verdadero verdadeiro falso vero waar onwaar prawda fałsz doğru
    yanlış истина ложь 真 假 صحيح خطأ""".split()  # yes, no, true and false, which are no tags
NO_WORD = re.compile(r"[\W\d_¹²³½¼¾]*(e[-+]?\d+)?")  # 80%, 3/5, <1, 1e-5
ENDING = re.compile(f"(?i)({'|'.join(map(re.escape, common.PHOTO_ENDINGS))})$")


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
        fail(f"--output {output} must end in .jsonl, and be neither a folder nor the input file")
    make_folder(output.parent)
    notes = defaultdict(list)  # what was left out or changed: all examples of it
    items = []
    for file in files:
        items += read_items(file, args, notes)
    write(output, join_items(items, notes), notes)


def read_items(file, args, notes):
    """-> [(a row's photo, what the row calls it, captions, tags or None, split)]"""
    rows = read_rows(file, args)
    root = os.path.abspath(args.root or (file if file.is_dir() else file.parent))
    columns = choose_columns(file, rows, root, args)
    names, places, by_path = find_photos(rows, columns["photo"][0], root)
    separators = {}
    for column in columns["tags"]:
        text = "".join(clean(row[column]) for row in rows if isinstance(row.get(column), str))
        marks = [mark for mark in "|;," if mark in text]
        separators[column] = marks[0] if marks else ","
        if marks:
            print_main(f"{file}: texts in {column} are split at {' and not at '.join(marks)}")
    separators |= dict.fromkeys(columns["tags where 1"])  # None
    items = []
    for row, name in zip(rows, names):
        paths = places[name]
        if paths is None:
            fail(f"{file}: a cell of {columns['photo'][0]} names several photos, {short(name)}: "
                 "write a row for each, or give --image-column")
        if len(paths) != 1:
            several = "rows whose name several photos have (write folder/name, or narrow --root)"
            notes[several if paths else "rows without a photo"].append([*paths, row])
            continue
        if paths[0] != os.path.join(root, name):
            notes["rows with a photo that is looked up by name"].append([name, paths[0]])
        captions = texts_of(row, dict.fromkeys(columns["captions"]), "captions", notes)
        tags = texts_of(row, separators, "tags", notes)
        if tags and not row.keys() >= {*columns["tags where 1"]}:
            notes["empty cells beside 0 and 1, which count as 0"].append(row)
        if not tags and [] not in [row.get(column) for column in separators]:
            tags = None  # not known
        split = lower(args.split or next((row.get(key) for key in columns["split"]), ""))
        called = stem(name) if by_path else unicodedata.normalize("NFC", name)
        items.append((paths[0], called, captions, tags, SPLITS.get(split, split)))
    return items


def read_rows(path, args):
    """The rows of a file, or of a folder of KEY.txt -> [{name of a column: value}]"""
    if path.is_dir():
        rows = folder_rows(path)
    elif not path.is_file():
        fail(f"there is no {path}")
    elif path.suffix.lower() == ".parquet":
        fail(f"{path}: docs/running.md writes the rows of a .parquet as photos.jsonl")
    elif (text := decode(path)).lstrip().startswith(("{", "[")):
        rows = json_rows(path, text.rstrip())
    else:
        rows = text.strip() and table_rows(path, text, args)
    if not rows:
        fail(f"{path} has no rows, or none below the names of its columns")
    if not all(row and isinstance(row, dict) for row in rows):
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
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # \r alone: of Excel for Mac
    if lost := re.search("[\0\ufffd]", text):
        line = text.count("\n", 0, lost.start()) + 1
        fail(f"{path}, line {line}, is not UTF-8 text: save it as such, a spreadsheet as .csv")
    return text


def folder_rows(folder):
    """Of KEY.txt, which has a caption on each line, and of photos that have none beside them"""
    texts, photos, rows = defaultdict(list), defaultdict(list), []  # {key: names of files}
    for path in common.list_photos(folder, (".txt", *common.PHOTO_ENDINGS)):
        key, ending = os.path.splitext(os.path.relpath(path, folder))
        files = texts if ending.lower() == ".txt" else photos
        files[plain(key)].append(key + ending)
    if not texts:
        fail(f"{folder} has no KEY.txt beside KEY.jpg: name the file that holds the captions")
    if not texts.keys() & photos.keys():
        photos.clear()  # the texts are in a folder of their own
    for key in {**texts, **photos}:
        if len(texts[key]) > 1 or texts[key] and len(photos[key]) > 1:
            fail(f"{folder}: which text is of which photo? {', '.join(texts[key] + photos[key])}: "
                 "keep one KEY.txt and one photo KEY, or rename them")
        lines = decode(Path(folder, texts[key][0])).split("\n") if texts[key] else []
        for name in photos[key] or [texts[key][0][:-4]]:
            rows.append({"image": name, "captions": list(filter(str.strip, lines))})
    if unread := common.list_photos(folder, (".json", ".caption", ".csv")):
        print_main(f"{folder}: only KEY.txt is read, not {len(unread)} files such as {unread[0]}")
    return rows


def json_rows(path, text):
    """A list of rows, one on each line, COCO's file, or an object with one list of rows"""
    decoder, rows, end = json.JSONDecoder(object_pairs_hook=without_repeats), [], 0
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
    is_coco = "images" in tables and "annotations" in tables
    is_row = any(CAPTIONS.fullmatch(column_name(name)) for name in content.keys() - tables.keys())
    if not is_coco and (is_row or len(tables) != 1):
        return rows
    read = ["images", "annotations"] if is_coco else [*tables]
    print_main(f"{path}: read {read}, not {short([name for name in content if name not in read])}")
    if not is_coco:
        return tables[read[0]]
    images, others = tables["images"], tables["annotations"]
    files = {str(row.get("id")): row.get("file_name") for row in images}
    if len(files) < len({row.get("file_name") for row in images}):
        fail(f"{path}: several images have the same id")
    for row in others:
        row["file_name"] = files.get(str(row.get("image_id")))
    return images + others


def table_rows(path, text, args):
    """csv or tsv, as the header tells"""
    text = text.lstrip("\n")
    lines = text.split("\n")
    mark = max(",\t|;", key=lines[0].count)
    csv.field_size_limit(2**31 - 1)  # 131,072 characters otherwise
    form = {"delimiter": mark, "skipinitialspace": mark in ",;", "strict": True}
    reader = csv.DictReader(io.StringIO(text), restval="", **form)
    rows, broken, swallowed = [], [], []
    try:
        names = reader.fieldnames or []
        while names and not names[-1].strip():  # nameless columns at the end, as Excel's
            names.pop()
        named_columns(path, args, names)
        for row in reader:
            line = reader.line_num
            if any(map(str.strip, row.pop(None, []))):
                fail(f"{path}, line {line}, has too many cells: captions need quotes")
            rows.append(row)
            breaks = "".join(row.values()).count("\n")
            broken += [f"line {line - breaks}: {short(row)}"] * breaks
            within = lines[reader.line_num - breaks : reader.line_num]
            if lines[0].count(mark) in [text.count(mark) for text in within]:
                swallowed.append(broken[-1])
    except csv.Error as error:
        fail(f"{path}, line {reader.reader.line_num}: {error}: quotes must be those of csv")
    if broken:
        print_main(f"{path}: line breaks within quotes: {len(broken)}, the first in {broken[0]}")
    if swallowed or len(broken) > 0.01 * len(rows):
        fail(f"{path}, {[*swallowed, *broken][0]}: a quote takes several lines into one cell. Is "
             "it not closed? Write captions of several lines as .jsonl or KEY.txt")
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
    return photo, captions, tags


def choose_columns(file, rows, root, args):
    """-> {what: names of columns}, which it prints; "tags where 1" say yes or no"""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    photo, captions, tags = named_columns(file, args, keys)
    others = [key for key in keys if key not in captions + tags]
    marks = find_marks(file, rows, tags)
    columns = {"photo": photo or [photo_column(file, rows, others, root)], "captions": captions}
    columns["tags"] = [name for name in tags if name not in marks]
    cells = {name: {lower(row.get(name)) for row in rows} for name in columns["tags"]}
    for one, other in combinations(cells, 2):  # pass and fail of two tests, say
        if shared := cells[one] & cells[other] - {*NOTHING}:
            print_main(f"{file}: {one} and {other} have the same tags: {short(sorted(shared))}")
    said = f"{args.split}, not the column " if args.split else ""
    columns["split"] = [said + key for key in keys if column_name(key) == "split"]
    columns["tags where 1"] = marks
    columns["not used"] = sorted({*keys}.difference(*columns.values()))
    taken = [f"{what}: {short(', '.join(names))}" for what, names in columns.items() if names]
    print_main(f"{file}: {'; '.join(taken)}")
    return columns


def photo_column(file, rows, keys, root):
    """The column of which nearly all rows name a photo, by its path before by its stem"""
    found = []
    for key in [key for key in keys if not WORDS.search(column_name(key))]:
        names, places, by_path = find_photos(rows, key, root)
        photos = [places[name] for name in names]
        share = sum(photo != [] for photo in photos) / len(rows)
        is_number = all(name.isdigit() for name in names if name)  # ages or prices, say
        if not is_number or share and NAMES.search(column_name(key)):
            is_image = bool(IMAGES.search(column_name(key))) and not is_number
            found.append((by_path, share, key, photos, is_image))
    by_path, share, best, photos, is_image = max(found, default=(False, 0.0, "", [], False))
    if not share:
        there = short(list(photos_below(root)[1])[:2])
        fail(f"{root} holds no photo of {file}, such as {short(rows[0])}, but photos of such "
             f"names: {there}. See --root and --image-column")
    for path_too, share_too, key, others, image_too in found:
        differ = any(one and other and one != other for one, other in zip(photos, others))
        as_good = path_too >= by_path and share_too >= min(share, 0.9) and share_too >= 0.5
        # Rows may be numbered as the photos are, by chance, while the column image names others.
        better_name = image_too and not is_image and others != photos
        if differ and as_good or better_name:
            fail(f"{file}: which column names the photo, {best} or {key}? Give --image-column")
    if share < 0.5:
        fail(f"{file}: only {share:.0%} of {best} name a photo below {root}: see --image-column")
    return best


def find_marks(file, rows, columns):
    """-> columns that say yes or no, whose cells become [name] or [], or go (not known)"""
    marks = []
    for name in columns:
        found = {lower(row.get(name)) for row in rows}.difference(NOTHING)
        votes = {cell for cell in found if NO_WORD.fullmatch(cell) or cell in VOTES}
        if not votes:
            continue
        if not found <= {*YES, *NO} and not (len(found) == 1 and found <= {*MARKS}):
            odd_first = sorted(votes, key=lambda cell: (cell in YES + NO + MARKS, cell))
            some = ", ".join(odd_first[:3] + sorted(found - votes)[:1])
            fail(f"{file}: {name} holds {short(some)}: tags are words; or 0 and 1, or yes and no, "
                 "or one mark, in all cells: replace votes by 1 and 0")
        marks.append(name)
        for row in rows:
            cell = lower(row.pop(name, ""))
            # An empty cell is a no beside marks alone; beside 0 and 1 it is not known.
            if cell not in NOTHING or not found & {*NO}:
                row[name] = [] if cell in (*NO, *NOTHING) else [name]
    return marks


def lower(cell):
    return "" if cell is None else str(cell).strip().lower()


def join_items(items, notes):
    """-> [{"image", "captions", "tags", "split"}], one for each photo"""
    names = defaultdict(set)
    for path, called, *_ in items:
        names[path].add(called)
    photos = {}  # by the path with links resolved
    for path, called, captions, tags, split in items:
        if len(names[path]) > 1 and called != stem(path):
            notes["rows with several names of one photo"].append([path, *sorted(names[path])])
            continue
        photo = photos.setdefault(os.path.realpath(path), {"image": path, "captions": []})
        for text in captions:
            repeated = text in photo["captions"]
            (notes["repeated captions"] if repeated else photo["captions"]).append(text)
        if tags is not None:
            if photo.get("tags", tags) != tags:
                notes["rows with other tags than their photo's first row"].append([path, *tags])
            photo["tags"] = list(dict.fromkeys(photo.get("tags", []) + tags))
        if split not in NOTHING and photo.setdefault("split", split) != split:
            notes["rows in another split than their photo's first"].append([path, split])
    return list(photos.values())


def texts_of(row, separators, what, notes):
    """-> captions or tags in cells.  separators: {column: what stands between its tags, or None}"""
    texts = []
    for name, separator in separators.items():
        values = row.get(name, [])
        if isinstance(values, str):
            text = clean(values)
            if re.fullmatch(r"""\[ ?['"[({].*\]|\w*\( ?['"[({].*\)|\{ ?['"[({].*\}""", text):
                fail(f"{name} holds a list as text, {short(text)}: write the rows as JSON")
            values = text.split(separator) if separator else [values]
        for value in values if isinstance(values, list) else [values]:
            value = value.get("raw", value) if isinstance(value, dict) else value  # Karpathy's
            if not isinstance(value, str | None):
                notes[f"{what} that are no text"].append(row)
                continue
            text = clean(value or "")
            if value and has_html(value):
                notes[f"{what} that lost HTML"].append(value)
            if lower(text) in NOTHING or NO_WORD.fullmatch(text):
                notes[f"{what} without a letter"].append(row)
            else:
                texts.append(text)
    return texts


def find_photos(rows, column, root):
    """-> names in the rows; {name: paths below the root, or None: several photos}; by a path?"""
    names = [photo_name(row.get(column)) for row in rows]
    by_path, by_stem, _ = photos_below(root)
    places = {}
    for name in names:
        path = os.path.join(root, name)
        is_there = ENDING.search(name) and os.path.isfile(path)
        places[name] = [path] if is_there else by_path.get(plain(name), [])
    found_by_path = any(places.values())
    for name in [name for name in places if not places[name]]:
        parts = re.split(r"""[][()"'|;,\s]+""", name)
        found = [part for part in parts if ENDING.search(part)]
        found = found or [part for part in parts if "/" in part and by_end(part, root)]
        stems = {part for part in name.split("/") if part.lower() in by_stem}
        if len(stems) == name.count("/") + 1:  # s1/s2, of photos s1.jpg and s2.jpg
            found = [*stems]
        if len(found) > 1:
            places[name] = None
        elif not found_by_path:  # the stem would replace a missing photo by its mask
            places[name] = by_end(name, root)
    return names, places, found_by_path


def photo_name(cell):
    """The path in a cell; that of a link without ?query and #fragment, and with its spaces"""
    name = "" if lower(cell) in NOTHING else str(cell).strip()
    if re.match("(?i)https?://", name):
        name = unquote(re.sub(r"(?i)[?#].*?(?=[|;,\s]+https?:|$)", "", name))
    return name and os.path.normpath(name.replace("\\", "/"))


def by_end(name, root):
    """The photos with the longest end of a path, full/1.jpg of images/full/1.jpg; or its stem"""
    by_path, by_stem, folders = photos_below(root)
    # If the photos lie in several folders, one of the same name in another folder is another one.
    is_link = re.match("(?i)https?:/", name)
    with_folder = "/" in name and not is_link and len(folders) > 1
    for end in ends(name):
        if end in by_path and ("/" in end or not with_folder):
            return by_path[end]
    return [] if with_folder else by_stem.get(stem(name).lower(), [])


def ends(path):
    """Of a/b/1.jpg: a/b/1.jpg, b/1.jpg and 1.jpg"""
    parts = plain(path).split("/")
    return ["/".join(parts[n:]) for n in range(len(parts))]


def plain(name):
    """Composed (é is one character), in lower case"""
    return unicodedata.normalize("NFC", name).lower()


def stem(name):
    return ENDING.sub("", unicodedata.normalize("NFC", os.path.basename(name)))


@cache
def photos_below(root):
    """-> {end of a path: paths}; {stem: paths}; the folders with photos"""
    by_path, by_stem, folders = defaultdict(list), defaultdict(list), set()
    for path in filter(os.path.exists, common.list_photos(root)):  # links may point nowhere
        folders.add(os.path.dirname(path))
        by_stem[stem(path).lower()].append(path)
        for end in ends(os.path.relpath(path, root)):
            by_path[end].append(path)
    return by_path, by_stem, folders


def write(output, rows, notes):
    """Write the lines; print counts of what they hold and of what was left out."""
    have_splits = {row.get("split", "train") for row in rows} != {"train"}
    for row in rows:
        row["image"] = os.path.relpath(row["image"], output.parent)
        if not have_splits:  # some will be held out
            row.pop("split", None)
    counts = Counter(f"photos ({row.get('split', 'no split')})" for row in rows)
    counts["captions"] = sum(len(row["captions"]) for row in rows)
    tags = Counter(tag for row in rows for tag in row.get("tags", []))
    counts["tags"] = tags.total()
    if tags:
        counts[f"different tags: {short([*tags])}"] = len(tags)
    if any("tags" in row for row in rows):
        unknown = [row["image"] for row in rows if "tags" not in row]
        notes["photos whose tags are not known"] = unknown
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
