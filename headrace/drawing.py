"""Boxes drawn into a picture, for people: upright, one colour per class, labels that can be read."""

import colorsys
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from headrace.client_results import Detection
from headrace.many_inputs import NotWritten
from headrace.output import printable
from shared.errors import InvalidInput
from shared.image_geometry import Pixels
from shared.images import decode

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
"""Of the files that can be written."""
_GOLDEN_ANGLE = 0.618034
"""Of the colour circle: neighbouring class numbers get colours far apart, however many there are."""
_SHADOW = (20, 20, 20)
_SMALLEST_FONT, _LARGEST_FONT = 11, 64
"""Pixels."""
_LONGEST_NAME = 40


class _Place(NamedTuple):
    """A rectangle in whole pixels."""

    left: int
    top: int
    right: int
    bottom: int

    def meets(self, other: "_Place") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class _Label(NamedTuple):
    """What is written beside a box."""

    text: str
    place: _Place
    baseline: int


def draw_file(source: Path, target: Path, detections: Sequence[Detection]) -> None:
    """Read a picture, draw the boxes, and write it. Raises OSError, NotWritten (one of them) for `target`."""
    if not source.is_file():  # a pipe has been read to its end when the picture was sent
        raise NotWritten(0, f"{target}: {source} is no plain file, which could be read again")
    try:
        picture = decode(source.read_bytes())
    except InvalidInput as error:  # the server could read it: its decoder or its limits are others
        raise NotWritten(0, f"{target}: {error.text}") from None
    encoded = _encoded(draw(picture, detections), target)
    try:
        _replace(target, encoded)
    except OSError as error:
        raise NotWritten(error.errno, f"{target}: {error.strerror}") from error


def _encoded(drawn: Pixels, target: Path) -> bytes:
    """As the target's name says. Raises NotWritten: WebP has at most 16383 pixels a side, JPEG 65535."""
    try:
        done, encoded = cv2.imencode(target.suffix, drawn[:, :, ::-1])
    except (cv2.error, MemoryError):
        done, encoded = False, np.empty(0, np.uint8)
    if not done:
        height, width = drawn.shape[:2]
        kind = target.suffix.lower()
        raise NotWritten(0, f"{target}: {width} × {height} pixels are too many for {kind}; try .png")
    return encoded.tobytes()


def _replace(target: Path, content: bytes) -> None:
    """Whole or not at all: an interrupted command leaves no half a picture. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():  # a device, a pipe: nothing to be replaced
        target.write_bytes(content)
        return
    target = target.resolve()  # where a link leads
    temporary = target.with_name(f".{os.getpid()}-{target.name[:200]}")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def draw(picture: Pixels, detections: Sequence[Detection]) -> Pixels:
    """The picture, uint8 RGB, with the boxes drawn into it; the best lie on top. Changes the picture given."""
    longer = max(picture.shape[:2])
    line = max(2, round(longer / 300))
    size = min(_LARGEST_FONT, max(_SMALLEST_FONT, round(longer / 45)))
    boxes = [_whole(one, picture) for one in detections]
    labels = _labels(picture, detections, boxes, size)
    ordered = list(zip(detections, boxes, labels, strict=True))[::-1]
    for one, box, _ in ordered:
        _outline(picture, box, colour(one.label.index), line)
    for one, _, label in ordered:
        _write(picture, label, colour(one.label.index), size)
    return picture


def colour(index: int) -> tuple[int, int, int]:
    """A class's red, green, blue: bright, and always the same."""
    hue = (0.02 + index * _GOLDEN_ANGLE) % 1
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.75 if index % 2 else 0.95, 1.0 if index % 3 else 0.9)
    return round(red * 255), round(green * 255), round(blue * 255)


def _whole(one: Detection, picture: Pixels) -> _Place:
    height, width = picture.shape[:2]
    left, right = (min(max(round(x), 0), width - 1) for x in (one.left, one.right))
    top, bottom = (min(max(round(y), 0), height - 1) for y in (one.top, one.bottom))
    return _Place(left, top, right, bottom)


def _outline(picture: Pixels, box: _Place, shown: tuple[int, int, int], line: int) -> None:
    """A dark line under a bright one: it stands out on any background."""
    for width, tint in ((line + max(2, line // 2), _SHADOW), (line, shown)):
        cv2.rectangle(picture, box[:2], box[2:], tint, width, cv2.LINE_AA)


def _labels(picture: Pixels, detections: Sequence[Detection], boxes: list[_Place], size: int) -> list[_Label]:
    """One for each box; the best choose their places first."""
    font, taken, labels = cv2.FontFace("sans"), list[_Place](), list[_Label]()
    pad = max(2, size // 4)
    for one, box in zip(detections, boxes, strict=True):
        name = printable(one.label.name)[:_LONGEST_NAME] or one.label.index
        text = f"{name} {one.label.score * 100:.0f} %"
        _, _, width, _ = cv2.getTextSize((0, 0), text, (0, 0), font, size, 600)
        sides = (width + 2 * pad, size + 2 * pad)
        place = _free(_candidates(box, sides), taken, picture)
        taken.append(place)
        labels.append(_Label(text, place, place.bottom - pad - size // 6))
    return labels


def _candidates(box: _Place, sides: tuple[int, int]) -> list[_Place]:
    """Where a label belongs, the usual place first: above the box, inside it, below it; at its left, at its right."""
    width, height = sides
    tops = (box.top - height, box.top, box.bottom, box.bottom - height)
    return [_Place(x, y, x + width, y + height) for y in tops for x in (box.left, box.right - width)]


def _free(candidates: list[_Place], taken: list[_Place], picture: Pixels) -> _Place:
    """The first one that covers no label; moved into the picture where it would leave it."""
    height, width = picture.shape[:2]
    inside = [one for one in candidates if one.top >= 0 and one.bottom <= height] or candidates
    moved = [_moved(one, width, height) for one in inside]
    return next((one for one in moved if not any(one.meets(other) for other in taken)), moved[0])


def _moved(place: _Place, width: int, height: int) -> _Place:
    x = min(max(0, width - (place.right - place.left)), max(0, place.left))
    y = min(max(0, height - (place.bottom - place.top)), max(0, place.top))
    return _Place(x, y, x + place.right - place.left, y + place.bottom - place.top)


def _write(picture: Pixels, label: _Label, shown: tuple[int, int, int], size: int) -> None:
    place = label.place
    cv2.rectangle(picture, place[:2], (place.right - 1, place.bottom - 1), shown, cv2.FILLED)
    red, green, blue = shown
    ink = (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else (255, 255, 255)
    org = (place.left + max(2, size // 4), label.baseline)
    cv2.putText(picture, label.text, org, ink, cv2.FontFace("sans"), size, 600)
