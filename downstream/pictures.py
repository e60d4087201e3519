"""Photos of one's own, and pictures to look at: photos found by a text, and attention maps."""

import math
import os
import textwrap
from contextlib import suppress
from functools import cache
from itertools import groupby

import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

import common
from common import fail

FONT_SIZE = 15
GAP = 8  # pixels between photos
NO_FONT = """pictures have boxes for letters that no font of this system has: install more fonts, on
Debian and Ubuntu for example the packages fonts-noto-core and fonts-noto-cjk"""


def photo_files(paths):
    """-> CaptionData of the photos at these paths, without captions"""
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        fail(f"{len(missing)} of {len(paths)} photos are missing, the first is {missing[0]}")
    none = common.lists([] for _ in paths)
    images, tagged = np.array(paths, common.STRINGS), np.zeros(len(paths), bool)
    return common.CaptionData(images, none, none, tagged, [])


@cache
def system_fonts():
    """-> [(is it not sans-serif, not of regular weight, its path, the codes of its letters)]

    Not from matplotlib's own list, which does not change when fonts are installed.
    """
    from matplotlib import font_manager, ft2font, get_data_path  # only here: most do without

    found = []
    for path in [f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", *font_manager.findSystemFonts()]:
        with suppress(OSError, RuntimeError):  # a broken file
            font = ft2font.FT2Font(path)
            look = "Sans" not in font.family_name, font.style_name not in ("Regular", "Book")
            if font.scalable and "LastResort" not in path:  # that font of macOS has only boxes
                found.append((*look, path, font.get_charmap().keys()))
    return sorted(found, key=lambda font: font[:3])


def fonts_for(text, size):
    """-> [(font, codes of its letters)]: of those that have a letter, the first is to be used

    PIL's own font, the last one, has only the letters of English, and no font has all scripts.
    """
    default = ImageFont.load_default(size)
    letters = {ord(letter) for letter in text if letter >= " "}
    box = bytes(default.getmask("\uffff"))  # which is in no font
    lacking = {code for code in letters if bytes(default.getmask(chr(code))) == box}
    fonts = [(default, range(0x110000))]
    while lacking:
        *_, path, codes = max(
            system_fonts(), key=lambda font: (len(lacking & font[-1]), letters <= font[-1])
        )
        if not lacking & codes:
            common.report_once(NO_FONT)
            break
        fonts.insert(-1, (ImageFont.truetype(path, size), codes))
        lacking -= codes
    return fonts


def parts(text, fonts):
    """Split a text where the font changes -> [(font, part)]"""
    font_of = lambda letter: next(font for font, codes in fonts if ord(letter) in codes)
    return [(font, "".join(part)) for font, part in groupby(text, font_of)]


def length(text, fonts):
    return sum(font.getlength(part) for font, part in parts(text, fonts))


def wrap(text, size, width):
    """-> lines that fit into so many pixels, even if "…" is added; the fonts"""
    fonts = fonts_for(text, size)
    for columns in range(max(1, int(width) // 3), 0, -1):
        lines = textwrap.wrap(text, columns)
        if all(length(line + "…", fonts) <= width for line in lines):
            break
    return lines, fonts


def write(canvas, x, y, text, size, fill, width, most=1, centred=False, **style):
    """Draw a text below y, in at most so many lines of so many pixels, from x on or centred at x

    style: of ImageDraw.text.
    """
    lines, fonts = wrap(text, size, width)
    if len(lines) > most:
        lines[most - 1] += "…"
    for n, line in enumerate(lines[:most]):
        left = x - length(line, fonts) / 2 if centred else x
        baseline = y + size + n * (size + 4)
        for font, part in parts(line, fonts):
            canvas.text((left, baseline), part, fill, font, "ls", **style)
            left += font.getlength(part)


def draw_rows(texts, data, nearest, scores, path, framed=None, side=128):
    """One picture: for each text a row of the photos `nearest`, with their scores below them

    data: CaptionData or similar.  nearest: indices into it.  framed: the index of the photo to
    frame, for each text; None for no frames
    """
    column_width = side + GAP
    row_height = side + 48
    width = len(nearest[0]) * column_width + GAP
    height = len(texts) * row_height + GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    for row, text in enumerate(texts):
        y = GAP + row * row_height
        write(draw, GAP, y, text, FONT_SIZE, "black", width - 2 * GAP)
        top = y + 22
        bottom = top + side
        for column, index in enumerate(nearest[row]):
            x = GAP + column * column_width
            [pixels] = common.read_crops(data, index, [common.centre_crop], side)
            sheet.paste(Image.fromarray(pixels), (x, top))
            score = f"{scores[row][column]:.2f}"
            write(draw, x + side / 2, bottom, score, FONT_SIZE, "grey", side, centred=True)
            if framed and index == framed[row]:
                frame = x - 3, top - 3, x + side + 2, bottom + 2
                draw.rectangle(frame, outline="green", width=3)
    sheet.save(path)


def draw_attention(image, caption, words, path, side=192):
    """The photo, then the photo under the attention map of each word, bicubically enlarged.

    words: [(word, (h, w) not negative), ...]. [VirTex Sec. 4.4] Brightness is relative to the
    map's maximum, so that a uniform map looks uniform [ours]; VirTex, App. B, maps each to [0, 1].
    """
    photo = np.asarray(image.resize((side, side), Image.BICUBIC), np.float32)
    tiles = [("", photo)]
    for word, attention in words:
        tiles.append((word, highlight(photo, attention)))
    columns = min(6, len(tiles))
    column_width = side + GAP
    row_height = side + 28
    width = columns * column_width + GAP
    lines, _ = wrap(caption, FONT_SIZE, width - 2 * GAP)
    top = 16 + (FONT_SIZE + 4) * len(lines)
    height = top + math.ceil(len(tiles) / columns) * row_height
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    write(draw, GAP, GAP, caption, FONT_SIZE, "black", width - 2 * GAP, len(lines))
    for n, (word, tile) in enumerate(tiles):
        row, column = divmod(n, columns)
        x = GAP + column * column_width
        y = top + row * row_height
        pixels = tile.clip(0, 255).astype(np.uint8)
        sheet.paste(Image.fromarray(pixels), (x, y))
        write(draw, x + side / 2, y + side + 4, word, FONT_SIZE, "black", side, centred=True)
    sheet.save(path)


def highlight(photo, attention):
    """Dim the photo (side, side, 3), but brighten it where the attention (h, w) is high."""
    heat = (attention / attention.max()).float().cpu()
    heat = F.interpolate(heat[None, None], photo.shape[:2], mode="bicubic")
    heat = heat[0, 0, :, :, None].clamp(0, 1).numpy()
    dimmed = photo * (0.35 + 0.25 * heat)
    return dimmed + heat * (102, 70, 0)
