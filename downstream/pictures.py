"""Photos of one's own, and pictures to look at: photos found by a text, and attention maps."""

import math
import os
import textwrap

import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

import common
from common import fail

FONT_SIZE = 15
GAP = 8  # pixels between photos


def photo_files(paths):
    """-> CaptionData of the photos at these paths, without captions"""
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        fail(f"{len(missing)} of {len(paths)} photos are missing, the first is {missing[0]}")
    none = common.Lists([[] for _ in paths], common.STRINGS)
    return common.CaptionData(np.array(paths, common.STRINGS), captions=none, tags=none)


def draw_rows(texts, data, nearest, scores, path, framed=None, side=128):
    """One picture: for each text a row of the photos `nearest`, with their scores below them

    data: CaptionData or similar.  nearest: indices into it.  framed: the index of the photo to
    frame, for each text; None for no frames
    """
    font = ImageFont.load_default(FONT_SIZE)
    column_width = side + GAP
    row_height = side + 48
    width = len(nearest[0]) * column_width + GAP
    height = len(texts) * row_height + GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    for row, text in enumerate(texts):
        y = GAP + row * row_height
        draw.text((GAP, y), text, "black", font)
        top = y + 22
        bottom = top + side
        for column, index in enumerate(nearest[row]):
            x = GAP + column * column_width
            [pixels] = common.read_crops(data, index, [common.centre_crop], side)
            sheet.paste(Image.fromarray(pixels), (x, top))
            score = f"{scores[row][column]:.2f}"
            below = x + side / 2, bottom
            draw.text(below, score, "grey", font, anchor="ma")
            if framed and index == framed[row]:
                frame = x - 3, top - 3, x + side + 2, bottom + 2
                draw.rectangle(frame, outline="green", width=3)
    sheet.save(path)


def draw_attention(image, caption, words, path, side=192):
    """The photo, then the photo under the attention map of each word, bicubically enlarged.

    words: [(word, (h, w) not negative), ...]. Brightness is relative to the map's maximum, so that
    a uniform map looks uniform. [VirTex Sec. 4.4]
    """
    font = ImageFont.load_default(FONT_SIZE)
    photo = np.asarray(image.resize((side, side), Image.BICUBIC), np.float32)
    tiles = [("", photo)]
    for word, attention in words:
        tiles.append((word, highlight(photo, attention)))
    columns = min(6, len(tiles))
    column_width = side + GAP
    row_height = side + 28
    width = columns * column_width + GAP
    lines = textwrap.wrap(caption, width // 8)
    top = 16 + 18 * len(lines)
    height = top + math.ceil(len(tiles) / columns) * row_height
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    draw.multiline_text((GAP, GAP), "\n".join(lines), "black", font)
    for n, (word, tile) in enumerate(tiles):
        row, column = divmod(n, columns)
        x = GAP + column * column_width
        y = top + row * row_height
        pixels = tile.clip(0, 255).astype(np.uint8)
        sheet.paste(Image.fromarray(pixels), (x, y))
        below = x + side / 2, y + side + 4
        draw.text(below, word, "black", font, anchor="ma")
    sheet.save(path)


def highlight(photo, attention):
    """Dim the photo (side, side, 3), but brighten it where the attention (h, w) is high."""
    heat = (attention / attention.max()).float().cpu()
    heat = F.interpolate(heat[None, None], photo.shape[:2], mode="bicubic")
    heat = heat[0, 0, :, :, None].clamp(0, 1).numpy()
    dimmed = photo * (0.35 + 0.25 * heat)
    return dimmed + heat * (102, 70, 0)
