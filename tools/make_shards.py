"""Write a data set as shards, tar files in WebDataset's layout, with an index for --data

    python tools/make_shards.py --data photos.jsonl --output shards --side 256
    python virtex.py --data shards

Shards made by other tools (WebDataset, img2dataset) only need the index:

    python tools/make_shards.py --index-only 'photos/{000000..004000}.tar' --output shards
    python tools/make_shards.py --index-only 'photos/{split}-*.tar' --splits train val

A photo is KEY.jpg, with its captions and tags in KEY.json beside it. JPEG files are copied as they
are unless --side makes them smaller; other formats become JPEG. The index holds the paths of the
shards: if you move them, make it again with --index-only.
"""

import argparse
import collections
import glob
import io
import itertools
import json
import multiprocessing
import os
import re
import sys
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
from PIL import ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import fail, print_main, progress
from extras import pixels, shards
from extras.caption_files import clean

EXPECTED = (
    "uncompressed tar files with KEY.jpg and, beside it, KEY.txt, with a caption on each line, or "
    'KEY.json: {"captions": ["...", ...], "tags": ["...", ...]}'
)
PHOTOS = "jpg", "jpeg", "png", "webp"
HELD_OUT = 5  # shards at most: some 10,000 photos are enough for validation


def get_args(argv=None):
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--data", default="shapes", help="shapes (built in), coco, vg, a .jsonl, folder of shards")
    add("--root", help="folder of the data (default datasets/NAME; for a .jsonl, its folder)")
    add("--index-only", metavar="SHARDS", help="index existing shards: path with {00..99}, * or ?; "
        "without {split}, one shard in twenty (at most 5) becomes the split val")  # fmt: skip
    add("--splits", nargs="+", help="default train2017 val2017 for coco, else train val")
    add("--side", type=common.count, help="shrink photos to this shorter side, in pixels")
    add("--per-shard", type=common.count, default=5000, help="photos per shard")
    add("--output", default="shards", help="folder for the shards and the index")
    args = parser.parse_args(argv)
    year = "2017" if args.data == "coco" else ""
    args.splits = args.splits or [f"train{year}", f"val{year}"]
    return args


def main(args):
    common.make_folder(args.output)
    if args.index_only:
        paths = find_shards(args.index_only, args.splits)
    else:
        splits = {split: read_split(args, split) for split in args.splits}
        for split, data in splits.items():
            write_shards(args, split, data)
        paths = {}
        for path in sorted(glob.glob(f"{args.output}/*-*.tar")):  # earlier splits, too
            paths.setdefault(Path(path).name.rsplit("-", 1)[0], []).append(path)
    write_index(args.output, paths)
    print_main(f"use them with --data {args.output}; the splits are {', '.join(paths)}")


# ----------------------------------------------------------------------------------------- shards


def read_split(args, split):
    """-> CaptionData.  What is wrong with any split is said before the first is written."""
    if glob.glob(f"{args.output}/{split}-*.tar"):
        fail(f"{args.output} holds shards of {split}: delete them or change --output")
    return common.caption_data(args.data, args.root, split, tags=True)


def write_shards(args, split, data):
    """Decode the photos of a split on all cores, and write them in order."""
    with multiprocessing.Pool() as pool:
        photos = readable_photos(data, args.side, split, pool)
        count = 0
        for first in photos:
            path = f"{args.output}/{split}-{count:06d}.tar"
            others = itertools.islice(photos, args.per_shard - 1)
            write_shard(path, itertools.chain([first], others))
            count += 1
    if not count:
        fail(f"no photo of the split {split} can be decoded")
    print_main(f"{count} files {args.output}/{split}-*.tar of up to {args.per_shard} photos")


def readable_photos(data, side, split, pool):
    """CaptionData -> (number, JPEG file, JSON file) of each photo that can be decoded, in order"""
    tagged = bool(data.tag_names) & data.tagged
    files = pool.imap(partial(jpeg, data.open, side), data.images, chunksize=20)
    files = progress(files, desc=split, total=len(data), unit=" photos")
    for number, (content, error) in enumerate(files):
        if error:
            print_main(f"cannot decode {data.images[number]} ({error}): left out")
        else:
            row = {"captions": data.captions[number]}
            if tagged[number]:
                row["tags"] = data.tags[number]
            yield number, content, json.dumps(row).encode()


def jpeg(open_photo, side, place):
    """-> the bytes of a JPEG file, a copy of the photo's own or re-encoded; None or an error"""
    try:
        image = open_photo(place)
        small = not side or min(image.size) <= side
        if image.format in ("JPEG", "MPO") and small:  # MPO: several JPEGs, by phones
            image.fp.seek(0)
            content = image.fp.read()
            image.load()  # raises if the file is truncated
            return content, None
        image = ImageOps.exif_transpose(pixels.to_rgb(image))
        if not small:
            scale = side / min(image.size)
            size = [round(scale * length) for length in image.size]
            image = image.resize(size, reducing_gap=3.0)
        content = io.BytesIO()
        image.save(content, "JPEG", quality=90)
        return content.getvalue(), None
    except Exception as error:  # PIL's decoders raise many kinds
        return None, described(error)


def described(error):
    """In one line: the repr of a UnicodeDecodeError would hold the whole file"""
    return common.one_line(f"{type(error).__name__}: {error}")


def write_shard(path, photos):
    with tarfile.open(path, mode="w") as tar:
        for number, photo, text in photos:
            for suffix, content in (("jpg", photo), ("json", text)):
                entry = tarfile.TarInfo(f"{number:09d}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


# ------------------------------------------------------------------------------------------ index


def find_shards(pattern, splits):
    """--index-only -> {split: paths}"""
    if "{split}" in pattern:
        return {split: shard_paths(pattern.replace("{split}", split)) for split in splits}
    paths = shard_paths(pattern)
    if len(paths) == 1:
        fail(f"{pattern} is one shard, and validation needs another one")
    order = np.random.default_rng(0).permutation(len(paths))
    num_val = min(HELD_OUT, max(1, len(paths) // 20))
    train = [paths[n] for n in sorted(order[num_val:])]
    val = [paths[n] for n in sorted(order[:num_val])]
    print_main(f"held out for validation: {', '.join(val)}")
    return {"train": train, "val": val}


def shard_paths(pattern):
    """ "a/{08..11}.tar" or "a/*.tar" -> sorted paths; with braces all files must be there"""
    paths = sorted(filter(os.path.isfile, glob.glob(pattern)))
    braces = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", pattern)
    if braces:
        before, first, last, after = braces.groups()
        numbers = range(int(first), int(last) + 1)
        paths = [f"{before}{number:0{len(first)}}{after}" for number in numbers]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing or not paths:
        fail(f"--index-only {pattern}: there is no {missing[0] if missing else 'such file'}")
    return paths


def write_index(folder, paths):
    """Write the index of each split.  paths: {split: of its shards}"""
    photos = {}
    with multiprocessing.Pool() as pool:
        for split in paths:
            found = pool.imap(read_shard, paths[split])
            found = progress(found, desc=split, total=len(paths[split]), unit=" shards")
            photos[split] = readable_rows(split, zip(paths[split], found))
    tags = [tag for rows in photos.values() for _, _, tags in rows for tag in tags or ()]
    tag_names = list(dict.fromkeys(tags))  # of all splits alike
    for split, rows in photos.items():
        places, captions, tags = zip(*rows)
        tagged = np.array([row is not None for row in tags])
        tags = [dict.fromkeys(row or ()) for row in tags]
        texts = common.lists(captions), common.lists(tags)
        shards.save_index(folder, split, common.CaptionData(places, *texts, tagged, tag_names))
        num_captions, num_tags = (sum(map(len, lists)) for lists in (captions, tags))
        print_main(f"{split}: {len(rows)} photos, {num_captions} captions, {num_tags} tags")
        lacking = sum(not row for row in captions)
        if lacking:
            print_main(f"{split}: {lacking} photos have no caption in a KEY.txt or KEY.json")


def readable_rows(split, found):
    """Report the faults.  found: (path, what read_shard gives) of each shard -> rows of all"""
    rows, lost, report = [], collections.Counter(), ""
    for path, (photos, faults) in found:
        rows += photos
        lost.update(kind for kind, _ in faults)
        if faults:  # one line for each shard
            more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
            report = common.one_line(f"{path}: {faults[0][1]}{more}")
            print_main(report)
    if not rows:
        fail(f"no photo of the split {split} can be read. {report}. Expected: {EXPECTED}")
    if lost:
        counts = " and ".join(f"{count} {kind}" for kind, count in lost.items())
        print_main(f"{split}: left out {counts}, see above; of shards what comes after the fault")
    return rows


def read_shard(path):
    """One shard -> what can be read of it, and its faults

    [(place of a photo, see shards.open_in_shard; captions; tags or None)], and what is left out:
    ("shards", message), ("photos", message) of those with a broken text, ("texts", message)
    """
    photos, faults, keys, alone = [], [], set(), []
    try:
        with tarfile.open(path, "r:") as tar:
            files = filter(is_ours, tar)
            for key, group in itertools.groupby(files, lambda file: split_name(file.name)[0]):
                if key in keys:
                    photos = []  # without the texts that come later
                    raise ValueError(f"the files of {key} are not adjacent: use tar --sort=name")
                keys.add(key)
                by_suffix = {split_name(file.name)[1]: file for file in group}
                photo = next((by_suffix[suffix] for suffix in PHOTOS if suffix in by_suffix), None)
                if not photo:
                    dotted = [file.name for file in by_suffix.values() if is_dotted(file.name)]
                    faults += [("photos", f"{name}: a dot within KEY") for name in dotted]
                    alone += [key] if {"txt", "json"} & by_suffix.keys() else []
                    continue
                try:
                    texts = read_captions(tar, by_suffix)
                except Exception as error:  # no UTF-8, no JSON, wrong types
                    faults.append(("photos", f"{key}: {described(error)}"))
                    continue
                name = common.one_line(photo.name)  # to look at; without tabs
                place = os.path.abspath(path), name, photo.offset_data, photo.size
                photos.append(("\t".join(map(str, place)), *texts))
            check_end(tar)
    except Exception as error:  # no tar file, or it breaks off: what came before is kept
        faults.append(("shards", described(error)))
    if not photos and not faults:
        faults.append(("shards", "it holds no photo"))
    elif photos:
        faults += [("texts", f"{key} has no photo") for key in alone]
    return photos, faults


def is_ours(file):
    """A file that is not hidden: macOS writes ._KEY.jpg beside KEY.jpg"""
    return file.isfile() and not os.path.basename(file.name).startswith(".")


def is_dotted(name):
    """The name of a photo whose key ends for us at an earlier dot"""
    return split_name(name)[1].endswith(tuple(f".{suffix}" for suffix in PHOTOS))


def check_end(tar):
    """tarfile takes a broken header for the end, which has zeros."""
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(512) != bytes(512):
        raise ValueError(f"it breaks off at byte {tar.offset}")


def split_name(name):
    """ "a/12.seg.png" -> "a/12", "seg.png": like WebDataset, at the first dot of the file's name"""
    folder, file = os.path.split(name)
    key, _, suffix = file.partition(".")
    return os.path.join(folder, key), suffix.lower()


def read_captions(tar, by_suffix):
    """The files beside a photo -> captions, tags or None, if they are not given"""
    row = {}
    if "json" in by_suffix:
        row = json.loads(tar.extractfile(by_suffix["json"]).read())
    caption = row.get("caption")  # img2dataset writes one, or null
    captions, tags = row.get("captions", [caption] if caption else []), row.get("tags")
    if "txt" in by_suffix and "captions" not in row:
        captions = tar.extractfile(by_suffix["txt"]).read().decode("utf-8-sig").splitlines()
    captions = list(filter(None, map(clean, common.texts(captions) or ())))
    return captions, tags if tags is None else list(filter(None, map(clean, common.texts(tags))))


if __name__ == "__main__":
    main(get_args())
