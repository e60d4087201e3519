"""Pictures for people: photos found by a text, and where a model looks in a photo."""

import math
import textwrap
from functools import partial

import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

import common


def draw_rows(texts, images, nearest, scores, path, framed=None, side=128):
    """One picture: for each text a row of the images `nearest`, with their scores below them

    framed: for each text the image that gets a frame, None for no frames.
    """
    font, width, height = ImageFont.load_default(15), side + 8, side + 48
    sheet = Image.new("RGB", (len(nearest[0]) * width + 8, len(texts) * height + 8), "white")
    draw = ImageDraw.Draw(sheet)
    for row, text in enumerate(texts):
        y = 8 + row * height
        draw.text((8, y), text, "black", font)
        for column, (n, score) in enumerate(zip(nearest[row], scores[row])):
            x = 8 + column * width
            crop = partial(common.centre_crop, 1.0)
            [pixels] = common.read_crops(images, n, [crop], side)
            sheet.paste(Image.fromarray(pixels), (x, y + 22))
            place = x + side / 2, y + 22 + side
            draw.text(place, f"{score:.2f}", "grey", font, anchor="ma")
            if framed and n == framed[row]:
                corners = x - 3, y + 19, x + side + 2, y + 24 + side
                draw.rectangle(corners, outline="green", width=3)
    sheet.save(path)


def draw_attention(image, caption, words, path, side=192):
    """The photo, then the photo under the attention map of each word, bicubically enlarged.

    words: [(word, (h, w) not negative), ...]. Brightness is in proportion to the map's maximum, so
    that an even map looks even. [VirTex Sec. 4.4]
    """
    photo, font = image.resize((side, side), Image.BICUBIC), ImageFont.load_default(15)
    columns = min(6, len(words) + 1)
    rows, width = math.ceil((len(words) + 1) / columns), columns * (side + 8) + 8
    lines = textwrap.wrap(caption, width // 8)
    top = 16 + 18 * len(lines)
    sheet = Image.new("RGB", (width, rows * (side + 28) + top), "white")
    draw = ImageDraw.Draw(sheet)
    draw.multiline_text((8, 8), "\n".join(lines), "black", font)
    for n, (word, attention) in enumerate([("", None), *words]):
        x, y = 8 + n % columns * (side + 8), top + n // columns * (side + 28)
        tile = np.asarray(photo, np.float32)
        if attention is not None:
            heat = (attention / attention.max())[None, None].float().cpu()
            heat = F.interpolate(heat, (side, side), mode="bicubic").clamp(0, 1)[0, 0, ..., None]
            heat = heat.numpy()
            tile = tile * (0.35 + 0.25 * heat) + heat * (102, 70, 0)  # dim, and glow where it looks
        sheet.paste(Image.fromarray(tile.clip(0, 255).astype(np.uint8)), (x, y))
        draw.text((x + side / 2, y + side + 4), word, "black", font, anchor="ma")
    sheet.save(path)
