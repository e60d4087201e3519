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
import sources
from common import fail, print_main, progress, require

SHARDS = (
    "uncompressed tar files with KEY.jpg and, beside it, KEY.txt with one caption or KEY.json: "
    '{"captions": ["...", ...], "tags": ["...", ...]}'
)
PHOTOS = "jpg", "jpeg", "png", "webp"
HELD_OUT = 5  # shards at most: some 10,000 photos are enough for validation


def get_args(argv=None):
    parser = common.build_parser(__doc__)
    add = parser.add_argument
    add("--data", default="shapes", help=common.DATA)
    add("--root", help="folder of the data, as in the scripts")
    add("--index-only", metavar="SHARDS", help="index existing shards: path with {00..99}, * or ?; "
        "without {split}, one shard in twenty (at most 5) becomes the split val")  # fmt: skip
    add("--splits", nargs="+", help="default train2017 val2017 for coco, else train val")
    add("--side", type=common.positive_int, help="shrink photos to this shorter side, in pixels")
    add("--per-shard", type=common.positive_int, default=5000, help="photos per shard")
    add("--output", default="shards", help="folder for the shards and the index")
    args = parser.parse_args(argv)
    usual = common.choose_recipe({}, ["--data", args.data])
    args.splits = args.splits or [usual["train_split"], usual["val_split"]]
    return args


def main(args):
    os.makedirs(args.output, exist_ok=True)
    if args.index_only:
        shards = others_shards(args.index_only, args.splits)
    else:
        for split in args.splits:
            write_shards(args, split)
        shards = {}
        for path in sorted(glob.glob(f"{args.output}/*-*.tar")):  # earlier splits, too
            shards.setdefault(Path(path).name.rsplit("-", 1)[0], []).append(path)
    write_index(args.output, shards)
    print_main(f"use them with --data {args.output}; the splits are {', '.join(shards)}")


# ----------------------------------------------------------------------------------------- shards


def write_shards(args, split):
    """Decode the photos of a split on all cores, and write them in order."""
    kept = glob.glob(f"{args.output}/{split}-*.tar")
    require(not kept, f"{args.output} holds shards of {split}: delete them or change --output")
    data = common.caption_data(args.data, args.root, split)
    with multiprocessing.Pool() as pool:
        photos = readable_photos(data, args.side, split, pool)
        count = 0
        for first in photos:
            path = f"{args.output}/{split}-{count:06d}.tar"
            others = itertools.islice(photos, args.per_shard - 1)
            write_shard(path, itertools.chain([first], others))
            count += 1
    require(count, f"no photo of the split {split} can be decoded")
    print_main(f"{count} files {args.output}/{split}-*.tar of up to {args.per_shard} photos")


def readable_photos(data, side, split, pool):
    """CaptionData -> (number, JPEG file, JSON file) of each photo that can be decoded, in order"""
    single_photos = (data.select([i]) for i in range(len(data)))
    encoded = pool.imap(partial(encode, side), single_photos, chunksize=20)
    encoded = progress(encoded, desc=split, total=len(data), unit=" photos")
    for number, (photo, text, error) in enumerate(encoded):
        if error:
            print_main(error)
        else:
            yield number, photo, text.encode()


def encode(side, data):
    """CaptionData of one photo -> JPEG file, its JSON, None or why the photo cannot be decoded"""
    tags = [data.tag_names[tag] for tag in data.tags_of(0)]
    text = json.dumps({"captions": data.captions_of(0), "tags": tags})
    try:
        return jpeg(common.open_image(data.images[0]), side), text, None
    except Exception as error:  # PIL's decoders raise many kinds
        return None, text, f"cannot decode {data.images[0]} ({error}): left out"


def jpeg(image, side):
    """The bytes of a JPEG file: a copy of the photo's own, or re-encoded"""
    small = not side or min(image.size) <= side
    if image.format == "JPEG" and small:
        image.fp.seek(0)
        content = image.fp.read()
        image.load()  # raises if the file is truncated
        return content
    image = common.to_rgb(ImageOps.exif_transpose(image))
    if not small:
        scale = side / min(image.size)
        image = image.resize([round(scale * length) for length in image.size], reducing_gap=3.0)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=90)
    return content.getvalue()


def write_shard(path, photos):
    with tarfile.open(path, mode="w") as tar:
        for number, photo, text in photos:
            for suffix, content in (("jpg", photo), ("json", text)):
                entry = tarfile.TarInfo(f"{number:09d}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


# ------------------------------------------------------------------------------------------ index


def others_shards(pattern, splits):
    """-> {split: paths}"""
    if "{split}" in pattern:
        return {split: shard_paths(pattern.replace("{split}", split)) for split in splits}
    paths = shard_paths(pattern)
    require(len(paths) > 1, f"{pattern} is one shard, and validation needs another one")
    order = np.random.default_rng(0).permutation(len(paths))
    num_val = min(HELD_OUT, max(1, len(paths) // 20))
    shards = {
        "train": [paths[n] for n in sorted(order[num_val:])],
        "val": [paths[n] for n in sorted(order[:num_val])],
    }
    print_main(f"held out for validation: {', '.join(shards['val'])}")
    return shards


def shard_paths(pattern):
    """ "a/{08..11}.tar" or "a/*.tar" -> sorted paths; with braces all files must be there"""
    braces = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", pattern)
    if not braces:
        paths = sorted(filter(os.path.isfile, glob.glob(pattern)))
        require(paths, f"--index-only {pattern}: no such file")
        return paths
    before, first, last, after = braces.groups()
    numbers = range(int(first), int(last) + 1)
    paths = [f"{before}{number:0{len(first)}}{after}" for number in numbers]
    missing = [path for path in paths if not os.path.isfile(path)]
    require(paths and not missing, f"{pattern}: {len(missing)} shards are missing {missing[:1]}")
    return paths


def write_index(folder, shards):
    """Write the index of each split, for sources.shard_data.  shards: {split: paths}

    All splits share one list of tag names.
    """
    photos = {}
    with multiprocessing.Pool() as pool:
        for split, paths in shards.items():
            photos[split] = []
            indexed = pool.imap(index_shard, paths)
            for path in progress(paths, desc=f"index of {split}", unit=" shards"):
                try:
                    photos[split] += next(indexed)
                except (ValueError, tarfile.TarError) as error:
                    fail(f"{path}: {error}. Expected: {SHARDS}")
    names = dict.fromkeys(tag for rows in photos.values() for _, _, tags in rows for tag in tags)
    for split, rows in photos.items():
        places, captions, tags = zip(*rows)
        images = np.array(places, common.STRINGS)
        captions, tags = common.join_lines(captions), common.join_lines(tags)
        data = common.CaptionData(images, captions, tags, list(names) or None)
        sources.save_index(folder, split, data)


def index_shard(path):
    """One shard -> [(position of the photo, see sources.open_in_shard; its captions; its tags)]"""
    photos, keys = [], set()
    with tarfile.open(path, "r:") as tar:
        files = filter(tarfile.TarInfo.isfile, tar)
        for key, group in itertools.groupby(files, lambda file: split_name(file.name)[0]):
            if key in keys:
                raise ValueError(f"the files of {key} are not side by side: use tar --sort=name")
            keys.add(key)
            by_suffix = {split_name(file.name)[1]: file for file in group}
            photo = next((by_suffix[suffix] for suffix in PHOTOS if suffix in by_suffix), None)
            if photo:
                place = os.path.abspath(path), photo.name, photo.offset_data, photo.size
                captions, tags = read_captions(tar, by_suffix)
                photos.append(("\t".join(map(str, place)), captions, tags))
    if not photos:
        raise ValueError("it holds no photo")
    return photos


def split_name(name):
    """ "a/12.seg.png" -> "a/12", "seg.png": like WebDataset, at the first dot of the file's name"""
    folder, file = os.path.split(name)
    key, _, suffix = file.partition(".")
    return os.path.join(folder, key), suffix.lower()


def read_captions(tar, by_suffix):
    """The files beside a photo -> captions, tags"""
    row = {}
    if "json" in by_suffix:
        row = json.loads(tar.extractfile(by_suffix["json"]).read())
        if not isinstance(row, dict):
            raise ValueError(f"{by_suffix['json'].name} holds no JSON object")
    caption = row.pop("caption", None)  # img2dataset writes one, or null
    if "txt" in by_suffix:
        row["captions"] = [tar.extractfile(by_suffix["txt"]).read().decode()]
    elif caption and "captions" not in row:
        row["captions"] = [caption]
    return common.captions_and_tags(row)


if __name__ == "__main__":
    common.run(main, get_args)
