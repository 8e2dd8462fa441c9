"""The formats that OpenCV does not read, or not rightly: Pillow decodes them. Imported by pool processes only.

AVIF, JPEG 2000, PNM, TGA, PSD, icons and many more; TIFF, BMP and PNG of unusual kinds. Slower than OpenCV's way, and
seldom taken. What comes out is the same: upright RGB, 16 bits scaled, over the background, the first frame.

Some readers of Pillow's find a larger picture in the file than the one that they told of, or decode while they open. So
Pillow's own limit, which all of them ask before they decode, is brought down to ours for as long as they work.
"""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, ImageOps, TiffImagePlugin

from shared.errors import InvalidInput
from shared.image_header import ImageHeader, too_large, undecodable

Pixels = npt.NDArray[np.uint8]

logging.getLogger("PIL").setLevel(logging.CRITICAL)  # a line over every broken image
Image.init()  # all readers: by default Pillow loads most of them when none of the usual ones fits

FORMATS = (
    "AVIF", "BMP", "DCX", "DDS", "DIB", "FLI", "FTEX", "GBR", "GIF", "ICO", "IM", "IMT", "JPEG", "JPEG2000", "MCIDAS",
    "MSP", "PCD", "PCX", "PIXAR", "PNG", "PPM", "PSD", "QOI", "SGI", "SPIDER", "SUN", "TGA", "TIFF", "WEBP", "XBM",
    "XPM", "XVTHUMB",
)  # fmt: skip
"""Those that Pillow itself reads from their bytes, and within bounds.

Not EPS, WMF and the like, which it hands to another program. Not ICNS, whose size is not the inner picture's; not
CUR, which knows no limit for it; not FITS, which unpacks as much as the file says; not BLP, where each byte of the file
is a turn of a Python loop, however small the picture.
"""

_ICON_PIXELS = 2_000_000
"""ICO is decoded while it is opened, in parts by Python. Icons have up to 256², a few 1024²."""
_ICON = b"\0\0\1\0"
_SLOW_PIXELS = 1_000_000
"""Where Pillow decodes in Python (plain PNM, QOI, BMP's run lengths, …): up to two seconds, of the five of a job."""
_TILE = 1 << 18
"""Pixels that are converted at a time: a few MB, so that a large picture needs little more than itself."""

_UNKNOWN = "the image is none of JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000, PNM, TGA, PSD, ICO or a like format"
_ORIENTATION = 274
"""EXIF's tag; above 4, rows are columns."""


def read_rare_header(data: bytes | memoryview, max_pixels: int) -> ImageHeader:
    """Format and size, upright. Raises InvalidInput, also for more than `max_pixels`."""
    with _opened(data, max_pixels, InvalidInput(_UNKNOWN)) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) > 4:
            width, height = height, width
        header = ImageHeader(format=image.format or "", width=width, height=height, rare=True)
        slow = any(tile.codec_name in Image.DECODERS for tile in image.tile)
    if slow and width * height > _SLOW_PIXELS:
        raise InvalidInput(
            f"the image has {width} × {height} pixels; of {header.format} in this form at most {_SLOW_PIXELS} are "
            "decoded: send it as PNG or JPEG"
        )
    return header


def decode_rare(
    data: bytes | memoryview, header: ImageHeader, background: tuple[int, int, int], max_pixels: int
) -> Pixels:
    """Upright RGB over the background, uint8 [height, width, 3]. Raises InvalidInput."""
    try:
        with _opened(data, max_pixels, undecodable(header)) as image:
            image.load()
            bits = _bits(image)
            ImageOps.exif_transpose(image, in_place=True)
            return _rgb(image, bits, background)
    except MemoryError:
        raise too_large(header) from None


@contextmanager
def _opened(data: bytes | memoryview, max_pixels: int, otherwise: InvalidInput) -> Iterator[ImageFile.ImageFile]:
    """An opened image. Whatever a reader of Pillow's raises is `otherwise`, but for MemoryError; its warnings are not.

    Raises InvalidInput, MemoryError.
    """
    icon = bytes(data[: len(_ICON)]) == _ICON
    most = min(max_pixels, _ICON_PIXELS) if icon else max_pixels
    with warnings.catch_warnings(action="ignore"), _limited_to(most):
        try:
            with Image.open(io.BytesIO(data), formats=_known()) as image:
                if image.format == "AVIF":  # the file's own `irot` and `imir` say which way up it is, and XMP does not
                    image.info.pop("xmp", None)
                yield image
        except MemoryError:
            raise
        except Image.DecompressionBombError as error:
            limit = f"the {most} of an icon" if most < max_pixels else f"pool.max_pixels ({max_pixels})"
            raise InvalidInput(f"the image has more pixels than {limit}") from error
        except Exception as error:  # SyntaxError included: they raise whatever occurs to them
            raise otherwise from error


@contextmanager
def _limited_to(pixels: int) -> Iterator[None]:
    """Pillow warns of more than its limit, and raises above twice as much."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = -(-pixels // 2)
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _known() -> list[str]:
    """Not every Pillow is built with all of them."""
    return [name for name in FORMATS if name in Image.OPEN]


def _rgb(image: Image.Image, bits: int, background: tuple[int, int, int]) -> Pixels:
    """Piece by piece: a picture of the largest size is held twice, here and there, and not five times."""
    rgb = np.empty((image.height, image.width, 3), np.uint8)
    grey = image.mode in {"I", "F"} or image.mode.startswith("I;16")
    white = _white(image, bits) if grey else 0.0
    for place, tile in _tiles(image):
        rgb[place] = _grey(tile, white) if grey else _colours(tile, background)
    return rgb


def _tiles(image: Image.Image) -> Iterator[tuple[tuple[slice, slice], Image.Image]]:
    width = min(image.width, _TILE)
    height = max(1, _TILE // width)
    for top in range(0, image.height, height):
        for left in range(0, image.width, width):
            right, bottom = min(left + width, image.width), min(top + height, image.height)
            yield (slice(top, bottom), slice(left, right)), image.crop((left, top, right, bottom))


def _colours(image: Image.Image, background: tuple[int, int, int]) -> Pixels:
    if image.has_transparency_data:
        under = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(under, image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def _white(image: Image.Image, bits: int) -> float:
    """Which value of grey is white, where there are more than 8 bits of it, or fractions; black is 0.

    Fractions are of 1 where none is larger, else of 255. 32 bits are often 16 in a larger place.
    """
    most = max(_numbers(tile).max(initial=0.0) for _, tile in _tiles(image))
    if image.mode == "F":
        return 1.0 if most <= 1 else 255.0
    return 2.0 ** (16 if most < 2**16 and bits > 16 else bits) - 1


def _grey(image: Image.Image, white: float) -> Pixels:
    grey = np.clip(np.rint(_numbers(image) * (255 / white)), 0, 255).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


def _numbers(image: Image.Image) -> npt.NDArray[np.float64]:
    return np.nan_to_num(np.asarray(image).astype(np.float64), nan=0.0)


def _bits(image: Image.Image) -> int:
    """Of a grey value. Pillow scales them to 16 itself, but for TIFF's."""
    bits = image.tag_v2.get(258, 16) if isinstance(image, TiffImagePlugin.TiffImageFile) else 16
    return int(bits[0] if isinstance(bits, tuple) else bits)
