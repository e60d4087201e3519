"""Pictures to look at: photos found by a text, and where a model looks in a photo."""

import math
import textwrap

import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

import common

FONT_SIZE = 15
GAP = 8  # pixels between photos


def draw_rows(texts, images, nearest, scores, path, framed=None, side=128):
    """One picture: for each text a row of the images `nearest`, with their scores below them

    framed: for each text the image to frame; None for no frames.
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
        for column, image in enumerate(nearest[row]):
            x = GAP + column * column_width
            [pixels] = common.read_crops(images[image], [common.centre_crop], side)
            photo = Image.fromarray(pixels)
            sheet.paste(photo, (x, top))
            score = f"{scores[row][column]:.2f}"
            below = x + side / 2, bottom
            draw.text(below, score, "grey", font, anchor="ma")
            if framed and image == framed[row]:
                frame = x - 3, top - 3, x + side + 2, bottom + 2
                draw.rectangle(frame, outline="green", width=3)
    sheet.save(path)


def draw_attention(image, caption, words, path, side=192):
    """The photo, then the photo under the attention map of each word, bicubically enlarged.

    words: [(word, (h, w) not negative), ...]. Brightness is relative to the map's maximum, so that
    a uniform map looks uniform. [VirTex Sec. 4.4]
    """
    font = ImageFont.load_default(FONT_SIZE)
    photo = image.resize((side, side), Image.BICUBIC)
    photo = np.asarray(photo, np.float32)
    columns = min(6, len(words) + 1)
    rows = math.ceil((len(words) + 1) / columns)
    column_width = side + GAP
    row_height = side + 28
    width = columns * column_width + GAP
    lines = textwrap.wrap(caption, width // 8)
    top = 16 + 18 * len(lines)
    height = rows * row_height + top
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    caption = "\n".join(lines)
    draw.multiline_text((GAP, GAP), caption, "black", font)
    tiles = [("", photo)]
    for word, attention in words:
        tiles.append((word, highlight(photo, attention)))
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
