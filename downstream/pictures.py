"""Photos of one's own, and pictures to look at: rows of photos with text, and attention maps."""

import importlib.util
import os
import textwrap
import warnings
from contextlib import suppress
from functools import cache

import numpy as np
import torch.nn.functional as F
from PIL import Image

import common
from common import fail

os.environ.pop("MPLBACKEND", None)  # a Jupyter kernel's, which may not be installed here
FONT_SIZE = 11  # in points
LINE = 20  # pixels for a line of text
GAP = 8  # pixels between photos
NO_FONT = "no font here has some letters: install more, on Debian fonts-noto-core, fonts-noto-cjk"


def photo_files(paths):
    """-> CaptionData of the photos at these paths, without captions"""
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        fail(f"{len(missing)} of {len(paths)} photos are missing, the first is {missing[0]}")
    none = common.lists([] for _ in paths)
    images, tagged = np.array(paths, common.STRINGS), np.zeros(len(paths), bool)
    return common.CaptionData(images, none, none, tagged, [])


@cache
def letters_of_fonts():
    """-> {family: codes of its letters}, matplotlib's own first

    System fonts are searched for anew, because matplotlib's list may lack those just installed.
    """
    from matplotlib import font_manager, ft2font  # only here and below: most do without

    letters = {}
    for path in [font_manager.findfont("DejaVu Sans"), *font_manager.findSystemFonts()]:
        with suppress(OSError, RuntimeError):  # a broken file, or a font of bitmaps
            font = ft2font.FT2Font(path)
            font_manager.fontManager.addfont(path)
            if "LastResort" not in path:  # a font of macOS that has a box for each letter
                letters.setdefault(font.family_name, set()).update(font.get_charmap())
    return letters


def fonts_for(text):
    """-> families for matplotlib, which takes each letter from the first one that has it"""
    families = ["DejaVu Sans"]
    for letter in text:
        having = [name for name, letters in letters_of_fonts().items() if ord(letter) in letters]
        if not having:
            common.report_once(NO_FONT)
            warnings.filterwarnings("ignore", "Glyph .* missing")  # matplotlib's, of each letter
        elif not set(having) & set(families):
            families.append(having[0])
    return families


def write(figure, x, y, text, width, most, **style):
    """Write at pixel (x, y) of a matplotlib figure, in at most `most` lines of `width` pixels."""
    style |= {"size": FONT_SIZE, "family": fonts_for(text)}
    # parse_math: "$5 and $6" is no formula.
    artist = figure.text(x, y, text, transform=None, parse_math=False, **style)
    columns = len(text)
    while columns > 1 and artist.get_window_extent().width > width:
        columns = min(columns - 1, int(columns * width / artist.get_window_extent().width) + 1)
        lines = textwrap.wrap(text, columns)
        if len(lines) > most:
            lines = [*lines[: most - 1], lines[most - 1] + "…"]
        artist.set_text("\n".join(lines))


def new_figure(path, width, height):
    """A figure of matplotlib of this many pixels; None, and a line, if it is not installed"""
    if not importlib.util.find_spec("matplotlib"):
        return common.print_main(f"{path} is not drawn: pip install matplotlib")
    from matplotlib.figure import Figure

    return Figure((width / 100, height / 100), dpi=100)


def draw_rows(path, rows, above=1, side=128):
    """Draw rows of photos, with a text above each row and a line below each photo

    rows: [(text above, [(pixels uint8 (side, side, 3), text below), ...]), ...].
    above: the most lines of the text above
    """
    columns = max(len(photos) for _, photos in rows)
    width = GAP + columns * (side + GAP)
    room_above = [above * LINE if title else 0 for title, _ in rows]
    height = GAP + sum(room_above) + len(rows) * (side + LINE + 8)
    figure = new_figure(path, width, height)
    if not figure:
        return
    bottom = height - GAP
    for room, (title, photos) in zip(room_above, rows):
        bottom -= room + side
        write(figure, GAP, bottom + side + 6, title, width - 2 * GAP, above, va="bottom")
        for column, (pixels, text) in enumerate(photos):
            x = GAP + column * (side + GAP)
            figure.figimage(pixels, x, bottom)
            write(figure, x + side / 2, bottom - 3, text, side, 1, ha="center", va="top")
        bottom -= LINE + 8
    figure.savefig(path)


def draw_nearest(path, texts, data, nearest, scores, side=128):
    """For each text a row of the photos `nearest`, indices into data, with their scores below"""
    rows = []
    for row, text in enumerate(texts):
        photos = []
        for index, score in zip(nearest[row], scores[row]):
            [pixels] = common.read_crops(data, index, [common.centre_crop], side)
            photos.append((pixels, f"{score:.2f}"))
        rows.append((text, photos))
    draw_rows(path, rows, side=side)


def draw_attention(image, caption, words, path, side=192, columns=6):
    """The photo, then the photo under the attention map of each word, bicubically enlarged.

    words: [(word, (h, w) not negative), ...]. [VirTex Sec. 4.4] The orange is relative to the map's
    maximum, so that a uniform map looks uniform, and where it is 0 the photo stays as it is [ours];
    VirTex, App. B, maps each to [0, 1].
    """
    photo = np.asarray(image.resize((side, side), Image.BICUBIC), np.float32)
    photos = [(photo.astype(np.uint8), "")]
    for word, attention in words:
        heat = (attention / attention.max()).float().cpu()
        heat = F.interpolate(heat[None, None], (side, side), mode="bicubic")
        heat = heat[0, 0, :, :, None].clamp(0, 1).numpy()
        pixels = photo + 0.6 * heat * (np.array([255, 140, 0]) - photo)  # orange where it looks
        photos.append((pixels.astype(np.uint8), word))
    rows = [("", photos[n : n + columns]) for n in range(0, len(photos), columns)]
    rows[0] = caption, photos[:columns]
    lines = 1 + 16 * len(caption) // (len(photos[:columns]) * side)  # a letter has up to 16 pixels
    draw_rows(path, rows, above=min(3, lines), side=side)
