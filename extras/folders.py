"""Photos in folders: which files are photos, and which a file system or an archiver has added"""

import os
from pathlib import Path

import numpy as np

from common import STRINGS, fail, print_main

PHOTO_ENDINGS = ".jpg .jpeg .jpe .jfif .mpo .png .webp .avif .gif .bmp .tif .tiff .jp2 .ppm .pgm"
PHOTO_ENDINGS = tuple(PHOTO_ENDINGS.split())
# Of a NAS (@eaDir has thumbnails, the next three what was deleted), Windows, Linux, and macOS
ADDED_FOLDERS = "@eaDir #recycle @Recycle #snapshot $RECYCLE.BIN lost+found __MACOSX".split()


def is_hidden(name):
    """Does it start with a dot, or is it a folder that a file system or an archiver adds?"""
    return name.startswith(".") or name in ADDED_FOLDERS


def list_photos(folder):
    """The paths of all photos below a folder, sorted -> list of str. Says what is left out.

    Links to folders are followed, but no folder is read twice: a link may lead back.
    """
    photos, others, hidden, visited = [], [], [], set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        hidden += [os.path.join(parent, name) for name in folders + files if is_hidden(name)]
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in files:
            if not is_hidden(name):
                found = photos if name.lower().endswith(PHOTO_ENDINGS) else others
                found.append(os.path.join(parent, name))
    if others:
        print_main(f"{len(others)} files are left out, because their names are not those of "
                   f"photos, for example {min(others)}")
    if hidden:
        print_main(f"{len(hidden)} files and folders are left out, which are hidden or added by a "
                   f"file system or an archiver, for example {min(hidden)}")
    return sorted(photos)


def labelled(root, split):
    """{split}/<class>/<photo>, or deeper -> paths (N,), labels (N,), names of the classes"""
    from torchvision.datasets.folder import find_classes  # only here: the import takes seconds

    path = Path(root, split)
    expected = f"Expected: {split}/CLASS/PHOTO: see --root, --train-split, --val-split"
    try:
        names = [name for name in find_classes(path)[0] if not is_hidden(name)]
    except OSError as error:  # there is no such folder, or none within it
        fail(f"{str(error).rstrip('.')}. {expected}")
    if len(names) < 2:
        fail(f"{path} has fewer than two classes: {', '.join(names) or 'none'}. Is --root a folder "
             f"too high? {expected}")
    photos = list_photos(path)
    places = [photo.removeprefix(f"{path}{os.sep}").split(os.sep) for photo in photos]
    rows = sorted((place[0], photo) for place, photo in zip(places, photos) if len(place) > 1)
    loose = len(photos) - len(rows)
    if loose:
        print_main(f"{path}: {loose} photos are in no folder of a class and are left out")
    numbers = {name: k for k, name in enumerate(names)}
    labels = np.array([numbers[name] for name, _ in rows], int)
    empty = [name for name in names if numbers[name] not in labels]
    if empty:
        fail(f"{path} has no photos in {', '.join(empty[:5])}. {expected}")

    # In Places and SUN397, a/airfield is a class, and the letters are not.
    inner = {(place[0], place[1]) for place in places if len(place) > 2}
    per_class = len({folder for _, folder in inner})
    if all(len(place) != 2 for place in places) and len(inner) < len(names) * per_class:
        print_main(f"{path}: no class has photos of its own, only folders such as "
                   f"{'/'.join(min(inner))}. If these are the classes, make links to them in a new "
                   f'--root: mkdir -p ROOT/{split}; ln -s "{path.resolve()}"/*/* ROOT/{split}')
    return np.array([photo for _, photo in rows], STRINGS), labels, names
