"""Encoded image bytes → upright RGB pixels. Used by pool processes only: it imports OpenCV.

Whatever the bytes are, the outcome is a whole image or InvalidInput with one sentence: never a part of an image,
never another exception. Pixels are uint8 RGB, rows first (HWC).
"""

from collections.abc import Callable
from typing import TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from shared.errors import InvalidInput
from shared.image_frames import first_frame_of_gif, first_frame_of_png
from shared.image_geometry import Pixels, is_transposed, scale_crop, scale_into, upright
from shared.image_header import ImageHeader, is_usual, read_header, too_large, undecodable
from shared.letterbox import Letterbox, fit

Colour: TypeAlias = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)

_REDUCED = {
    1: 0,
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
}
"""Flags of JPEG's reduced decode; the colour flag beside them decides that it is not grey."""

_BAND_BYTES = 1 << 20
"""Working memory of one step of compositing: stays in the CPU's cache, and small for large images."""


class _Limits:
    max_pixels = 50_000_000


def configure(max_pixels: int) -> None:
    """Once per process, at start: its pixel limit (`pool.max_pixels`), and one thread, since one job runs at a time."""
    _Limits.max_pixels = max_pixels
    cv2.setNumThreads(1)


def decode(data: bytes | memoryview, background: Colour = WHITE) -> Pixels:
    """The whole image, upright, as uint8 [height, width, 3] RGB; transparent pixels show `background`.

    Of an animation the first frame, of a TIFF the first page. Raises InvalidInput.
    """
    header = _checked_header(data)
    return np.ascontiguousarray(upright(_decode_stored(data, header, 1, background), header.orientation))


def fill_crop(data: bytes | memoryview, out: Pixels, crop_fraction: float, background: Colour = WHITE) -> None:
    """Fill `out`, uint8 [size, size, 3], with the upright centre crop of the image.

    The shorter side is scaled to size / crop_fraction, then the centre is kept. A JPEG of at least twice that size is
    decoded at a half, quarter or eighth. Raises InvalidInput; `out` is then undefined.
    """
    header = _checked_header(data)
    short = round(out.shape[0] / crop_fraction)
    stored = _shrunk(data, header, reduction(header, short), background)
    scale_crop(stored, short, out, header.orientation)


def fill_letterbox(data: bytes | memoryview, out: Pixels, background: Colour = WHITE) -> Letterbox:
    """Fill `out`, uint8 [size, size, 3], with the whole upright image in the middle, its shape kept.

    `background` is what is beside it, and behind transparent pixels. A JPEG whose longer side is at least twice `size`
    is decoded at a half, quarter or eighth. Raises InvalidInput; `out` is then undefined.
    """
    header = _checked_header(data)
    by = reduction(header, out.shape[0], of=max)
    stored = _shrunk(data, header, by, background)
    # Of a TIFF only the decoder knows which way it is up, and it shrinks none.
    height, width = (header.height, header.width) if by > 1 else stored.shape[:2]
    if is_transposed(header.orientation):
        height, width = width, height
    place = fit(width, height, out.shape[0])
    scale_into(stored, place, out, background, header.orientation)
    return place


def reduction(header: ImageHeader, least: int, of: Callable[[int, int], int] = min) -> int:
    """By how much (1, 2, 4, 8) the decoder may shrink the image so that its shorter side stays at least `least`.

    With `of=max`: its longer side.
    """
    if header.format != "JPEG":
        return 1  # other formats are decoded whole anyway
    return max(by for by in _REDUCED if by == 1 or of(header.width, header.height) >= by * least)


def _shrunk(data: bytes | memoryview, header: ImageHeader, by: int, background: Colour) -> Pixels:
    """As stored, at one `by`-th of its size."""
    stored = _decode_stored(data, header, by, background)
    # A reduced image ends with a pixel that stands for a part of a block: it goes when it is less than half.
    return stored[: max(1, round(header.height / by)), : max(1, round(header.width / by))] if by > 1 else stored


def _checked_header(data: bytes | memoryview) -> ImageHeader:
    header = read_header(data) if not len(data) or is_usual(data) else None
    if header is None or header.rare:
        from shared import image_rare  # noqa: PLC0415 - Pillow: most processes never need it

        header = image_rare.read_rare_header(data, _Limits.max_pixels)
    if header.width * header.height > _Limits.max_pixels:
        raise InvalidInput(
            f"the image has {header.width} × {header.height} pixels, more than pool.max_pixels ({_Limits.max_pixels})"
        )
    return header


# ------------------------------------------------------------------ decoding


def _decode_stored(data: bytes | memoryview, header: ImageHeader, reduce: int, background: Colour) -> Pixels:
    """Decode as stored, orientation not applied: uint8 RGB."""
    if header.rare:
        from shared import image_rare  # noqa: PLC0415 - as in `_checked_header`

        return image_rare.decode_rare(data, header, background, _Limits.max_pixels)
    if header.animated:
        data = _first_frame(memoryview(data), header)
    if header.alpha:
        image = _to_8_bit(_imdecode(data, cv2.IMREAD_UNCHANGED, header), header)
        return _on_background(image, header, background)
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION | _REDUCED[reduce]
    if header.depth > 8 and header.format == "PNG":
        # Scaled and rounded here. TIFF scales well by itself, and with this flag OpenCV 5.0 shows unwritten memory.
        flags |= cv2.IMREAD_ANYDEPTH
    image = _imdecode(data, flags, header)
    if header.transparent_grey is None:
        return _to_8_bit(image, header)
    unit = (256**image.itemsize - 1) // (2**header.depth - 1)  # the decoder stretches 1, 2 and 4 bits to 8
    transparent = image[:, :, 0] == header.transparent_grey * unit
    image = _to_8_bit(image, header)
    image[transparent] = background
    return image


def _imdecode(data: bytes | memoryview, flags: int, header: ImageHeader) -> Pixels:
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except MemoryError:
        raise too_large(header) from None
    except cv2.error as error:
        raise (too_large if error.code == cv2.Error.STS_NO_MEM else undecodable)(header) from None
    if image is None:
        raise undecodable(header)
    return image


def _to_8_bit(image: Pixels, header: ImageHeader) -> Pixels:
    """16 bits are scaled, not clipped: 65535 becomes 255."""
    if image.dtype == np.uint8:
        return image
    if image.dtype == np.uint16:
        return cv2.convertScaleAbs(image, alpha=1 / 257)
    raise undecodable(header)


def _on_background(image: Pixels, header: ImageHeader, background: Colour) -> Pixels:
    """What the decoder gives unchanged (grey, BGR or BGRA, uint8) → RGB over the background."""
    if image.ndim == 2:
        return cv2.cvtColor(image, cv2.COLOR_GRAY2RGB)
    if image.shape[2] == 3:
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    if image[:, :, 3].min() == 255:
        return cv2.cvtColor(image, cv2.COLOR_BGRA2RGB)
    height, width = image.shape[:2]
    mixed = np.empty((height, width, 3), np.uint8)
    rows = max(1, _BAND_BYTES // (8 * width))
    for top in range(0, height, rows):
        band = slice(top, top + rows)
        _mix(image[band], mixed[band], np.array(background, np.uint16), premultiplied=header.premultiplied)
    return mixed


def _mix(bgra: Pixels, out: Pixels, background: npt.NDArray[np.uint16], *, premultiplied: bool) -> None:
    colour = bgra[:, :, 2::-1].astype(np.uint16)
    alpha = bgra[:, :, 3:].astype(np.uint16)
    shown = (255 - alpha) * background
    if premultiplied:
        # Broken files have colours above their alpha; they must not wrap.
        colour = np.minimum(colour, alpha) * np.uint16(255)
    else:
        colour *= alpha
    colour += shown
    # Rounded division by 255, exact in 16 bits.
    colour += 128
    colour += colour >> 8
    np.right_shift(colour, 8, out=out, casting="unsafe")


def _first_frame(view: memoryview, header: ImageHeader) -> bytes:
    try:
        return first_frame_of_png(view) if header.format == "PNG" else first_frame_of_gif(view)
    except (ValueError, IndexError):
        raise undecodable(header) from None
