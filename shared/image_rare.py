"""The formats that OpenCV does not read, or not rightly: Pillow decodes them. Imported by pool processes only.

AVIF, JPEG 2000, PNM, TGA, PSD, icons and many more; TIFF, BMP and PNG of unusual kinds. Slower than OpenCV's way, and
seldom taken. What comes out is the same: upright RGB, 16 bits scaled, over the background, the first frame. Pillow's
own limit of 179 megapixels holds, too, as a second line of defence behind ours.
"""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, TiffImagePlugin

from shared.errors import InvalidInput
from shared.image_header import ImageHeader

Pixels = npt.NDArray[np.uint8]

logging.getLogger("PIL").setLevel(logging.CRITICAL)  # a line over every broken image
Image.init()  # all readers: by default Pillow loads most of them when none of the usual ones fits

FORMATS = (
    "AVIF", "BLP", "BMP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "GIF", "ICNS", "ICO", "IM", "IMT",
    "JPEG", "JPEG2000", "MCIDAS", "MSP", "PCD", "PCX", "PIXAR", "PNG", "PPM", "PSD", "QOI", "SGI", "SPIDER",
    "SUN", "TGA", "TIFF", "WEBP", "XBM", "XPM", "XVTHUMB",
)  # fmt: skip
"""Those that Pillow itself reads from their bytes. Not EPS, WMF and the like, which it hands to another program."""

_UNKNOWN = "the image is none of JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000, PNM, TGA, PSD, ICO or a like format"


_ORIENTATION = 274
"""EXIF's tag; above 4, rows are columns."""


def read_rare_header(data: bytes | memoryview) -> ImageHeader:
    """Format and size, upright, without decoding. Raises InvalidInput."""
    with _reading(_UNKNOWN), Image.open(io.BytesIO(data), formats=_known()) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) > 4:
            width, height = height, width
        return ImageHeader(format=image.format or "", width=width, height=height, rare=True)


def decode_rare(data: bytes | memoryview, header: ImageHeader, background: tuple[int, int, int]) -> Pixels:
    """Upright RGB over the background, uint8 [height, width, 3]. Raises InvalidInput."""
    broken = f"the image can't be decoded: its {header.format} data is truncated, broken or unsupported"
    with _reading(broken), Image.open(io.BytesIO(data), formats=_known()) as image:
        image.load()
        return np.ascontiguousarray(_rgb(ImageOps.exif_transpose(image), _bits(image), background))


def _known() -> list[str]:
    """Not every Pillow is built with all of them."""
    return [name for name in FORMATS if name in Image.OPEN]


@contextmanager
def _reading(sentence: str) -> Iterator[None]:
    """Whatever a reader of Pillow's raises becomes InvalidInput; what it warns of is decoration."""
    with warnings.catch_warnings(action="ignore"):
        try:
            yield
        except Exception as error:  # SyntaxError included: they raise whatever occurs to them
            raise InvalidInput(sentence) from error


def _rgb(image: Image.Image, bits: int, background: tuple[int, int, int]) -> Pixels:
    if image.mode in {"I", "F"} or image.mode.startswith("I;16"):
        return _grey(np.asarray(image), bits)
    if image.has_transparency_data:
        under = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(under, image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def _grey(values: npt.NDArray[np.generic], bits: int) -> Pixels:
    """Grey of more than 8 bits, or in fractions: black is 0, white is the largest value of its kind.

    Fractions are of 1 where none is larger, else of 255. 32 bits are often 16 in a larger place.
    """
    numbers = np.nan_to_num(values.astype(np.float64), nan=0.0)
    most = numbers.max(initial=0.0)
    if values.dtype.kind == "f":
        white = 1.0 if most <= 1 else 255.0
    else:
        white = 2.0 ** (16 if most < 2**16 and bits > 16 else bits) - 1
    grey = np.clip(np.rint(numbers * (255 / white)), 0, 255).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


def _bits(image: Image.Image) -> int:
    """Of a grey value. Pillow scales them to 16 itself, but for TIFF's."""
    bits = image.tag_v2.get(258, 16) if isinstance(image, TiffImagePlugin.TiffImageFile) else 16
    return int(bits[0] if isinstance(bits, tuple) else bits)
