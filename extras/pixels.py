"""Photos of more than 8 bits (X-rays, elevations), and transparent ones, as 8 bits of colour"""

import numpy as np
from PIL import Image


def to_rgb(image):
    """More than 8 bits are scaled from their range to 0..255; transparent pixels lie on white.

    A PIL image of any mode -> RGB
    """
    info = image.info  # with EXIF's orientation
    if image.mode[0] in "IF":
        values = np.nan_to_num(np.asarray(image, float))
        span = max(np.ptp(values), 1e-9)
        image = Image.fromarray((255 * (values - values.min()) / span).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    image.info = info
    return image
