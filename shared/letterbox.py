"""Where a picture lies in a square that it was fitted into with its shape kept. Arithmetic only: no image library."""

import msgspec
import numpy as np
import numpy.typing as npt

Boxes = npt.NDArray[np.float64]
"""[n, 4]: left, top, right, bottom."""


class Letterbox(msgspec.Struct, frozen=True):
    """A picture of `width` × `height`, upright, scaled to `inner_width` × `inner_height` at `left`, `top`; pixels."""

    width: int
    height: int
    left: int
    top: int
    inner_width: int
    inner_height: int

    def to_picture(self, boxes: Boxes) -> Boxes:
        """Boxes of the square → the same in pixels of the picture, cut at its edges."""
        shift = np.array([self.left, self.top] * 2, np.float64)
        scale = np.array([self.width / self.inner_width, self.height / self.inner_height] * 2)
        edges = np.array([self.width, self.height] * 2, np.float64)
        inside: Boxes = np.clip((boxes - shift) * scale, 0.0, edges)
        return inside


def fit(width: int, height: int, size: int) -> Letterbox:
    """The largest place with the picture's shape in the middle of a square of `size` pixels; at least one pixel."""
    longer = max(width, height)
    inner_width = max(1, round(width * size / longer))
    inner_height = max(1, round(height * size / longer))
    left, top = (size - inner_width) // 2, (size - inner_height) // 2
    return Letterbox(width, height, left, top, inner_width, inner_height)
