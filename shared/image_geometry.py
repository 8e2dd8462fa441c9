"""Scaling, cropping and turning decoded images. Used by pool processes only: it imports OpenCV."""

from typing import Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from shared.letterbox import Letterbox

Pixels: TypeAlias = npt.NDArray[np.integer[Any] | np.floating[Any]]
"""An image as OpenCV types it. In this project: uint8 [height, width, 3] RGB, unless a docstring says otherwise."""


_ROWS_REVERSED = frozenset({3, 4, 6, 7})
_COLUMNS_REVERSED = frozenset({2, 3, 7, 8})
_TRANSPOSED = frozenset({5, 6, 7, 8})
"""EXIF orientations by what makes them upright: first reverse, then transpose."""


def scale_crop(image: Pixels, short: int, out: Pixels, orientation: int = 1) -> None:
    """Scale the shorter side to `short` pixels and write the upright centre to `out`, [size, size, 3].

    Turned at the end, since the crop is far smaller than the photo.
    """
    size = out.shape[0]
    image = _trimmed(image)
    height, width = image.shape[:2]
    scale = short / min(height, width)
    # The whole image is scaled, not just the crop: the crop's edges seldom fall between two pixels, and a shift by a
    # fraction of a pixel costs more accuracy than the 0.05 ms are worth.
    scaled = (max(short, round(width * scale)), max(short, round(height * scale)))
    if scaled == (size, size) and orientation == 1:
        cv2.resize(image, scaled, dst=out, interpolation=_interpolation(scale))
        return
    whole = image if scale == 1 else cv2.resize(image, scaled, interpolation=_interpolation(scale))
    # An odd pixel is left over on the same side of the upright image, however the stored one lies.
    left = (scaled[0] - size + (orientation in _COLUMNS_REVERSED)) // 2
    top = (scaled[1] - size + (orientation in _ROWS_REVERSED)) // 2
    np.copyto(out, upright(whole[top : top + size, left : left + size], orientation))


def scale_into(
    image: Pixels, place: Letterbox, out: Pixels, background: tuple[int, int, int], orientation: int = 1
) -> None:
    """Scale the whole image to its place in `out`, [size, size, 3], upright, and fill what is left with `background`.

    Turned at the end, as in `scale_crop`.
    """
    right, bottom = place.left + place.inner_width, place.top + place.inner_height
    inside = out[place.top : bottom, place.left : right]
    sides = (place.inner_width, place.inner_height)
    stored = sides[::-1] if is_transposed(orientation) else sides
    scale = max(stored) / max(image.shape[:2])
    if orientation == 1 and inside.flags.c_contiguous:
        cv2.resize(image, stored, dst=inside, interpolation=_interpolation(scale))
    else:
        np.copyto(inside, upright(cv2.resize(image, stored, interpolation=_interpolation(scale)), orientation))
    for beside in (out[: place.top], out[bottom:], out[:, : place.left], out[:, right:]):
        beside[:] = background


def is_transposed(orientation: int) -> bool:
    """Whether an image with this EXIF orientation is upright with its width and height swapped."""
    return orientation in _TRANSPOSED


def upright(image: Pixels, orientation: int) -> Pixels:
    """A view of the image with its EXIF orientation (1..8) applied; nothing is copied."""
    if orientation in _ROWS_REVERSED:
        image = image[::-1]
    if orientation in _COLUMNS_REVERSED:
        image = image[:, ::-1]
    return image.swapaxes(0, 1) if orientation in _TRANSPOSED else image


def _trimmed(image: Pixels) -> Pixels:
    """Cut what the centre crop can't reach from the ends of a very long image: 1 × 65535 pixels must stay cheap."""
    height, width = image.shape[:2]
    keep = 2 * min(height, width) + 2
    cut_x, cut_y = max(0, width - keep) // 2, max(0, height - keep) // 2
    return image[cut_y : height - cut_y, cut_x : width - cut_x]


def _interpolation(scale: float) -> int:
    """Closest to an antialiased bicubic for the time it takes, see docs/decisions/image-resize.md."""
    if scale > 0.8:
        return cv2.INTER_CUBIC
    return cv2.INTER_LINEAR if scale > 0.5 else cv2.INTER_AREA
