"""Photos in folders: which files are photos, and which a file system or an archiver has added"""

import os

from common import print_main

PHOTO_ENDINGS = ".jpg .jpeg .jpe .jfif .mpo .png .webp .avif .gif .bmp .tif .tiff .jp2 .ppm .pgm"
PHOTO_ENDINGS = tuple(PHOTO_ENDINGS.split())
# Of a NAS (@eaDir has thumbnails of each photo), of Windows, Linux, and archives of macOS
ADDED_FOLDERS = "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found", "__MACOSX"


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
