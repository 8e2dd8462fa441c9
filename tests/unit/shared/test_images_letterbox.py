from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from shared import images
from shared.errors import InvalidInput
from shared.image_header import read_header
from shared.letterbox import Letterbox
from tests.support.pictures import Pixels, bomb_png, difference, encode, photo, reference, with_orientation

SIZE = 128
GREY = (128, 128, 128)


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    images.configure(50_000_000)
    yield
    images.configure(50_000_000)


def filled(data: bytes, size: int = SIZE) -> tuple[Pixels, Letterbox]:
    out = np.full((size, size, 3), 77, np.uint8)
    return out, images.fill_letterbox(data, out, GREY)


def inside(out: Pixels, place: Letterbox) -> Pixels:
    return out[place.top : place.top + place.inner_height, place.left : place.left + place.inner_width]


def expected(data: bytes, place: Letterbox) -> Pixels:
    whole = Image.fromarray(reference(data, GREY))
    return np.asarray(whole.resize((place.inner_width, place.inner_height), Image.Resampling.BILINEAR))


def beside(out: Pixels, place: Letterbox) -> Pixels:
    grey = np.ones(out.shape[:2], bool)
    grey[place.top : place.top + place.inner_height, place.left : place.left + place.inner_width] = False
    return out[grey]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP", "TIFF"])
@pytest.mark.parametrize("size", [(301, 200), (200, 301), (1200, 801)])
def test_the_whole_upright_picture_is_in_the_middle(size: tuple[int, int], kind: str, orientation: int) -> None:
    data = with_orientation(photo(*size), kind, orientation)
    out, place = filled(data)
    assert (place.height, place.width) == reference(data).shape[:2]
    assert difference(inside(out, place), expected(data, place)) < 2.0
    assert (beside(out, place) == GREY).all()


def test_a_large_jpeg_is_decoded_small() -> None:
    data = encode(photo(2000, 1300), "JPEG")
    assert images.reduction(read_header(data), SIZE, of=max) == 8
    out, place = filled(data)
    assert (place.width, place.height) == (2000, 1300)
    assert difference(inside(out, place), expected(data, place)) < 2.0


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (SIZE, SIZE), (SIZE, 1), (1, 4000), (4000, 1), (65_000, 2)])
def test_small_and_long_pictures(size: tuple[int, int]) -> None:
    data = encode(photo(*size), "PNG")
    out, place = filled(data)
    assert (place.width, place.height) == size
    assert max(place.inner_width, place.inner_height) == SIZE
    assert inside(out, place).size
    assert (beside(out, place) == GREY).all()


def test_a_picture_of_the_right_size_is_not_touched() -> None:
    picture = photo(SIZE, 96)
    out, place = filled(encode(picture, "PNG"))
    assert (inside(out, place) == np.asarray(picture)).all()


def test_transparent_pixels_show_the_background() -> None:
    clear = photo(60, 40).convert("RGBA")
    clear.putalpha(0)
    out, _ = filled(encode(clear, "PNG"))
    assert (out == GREY).all()


@pytest.mark.parametrize("data", [b"", b"no", encode(photo(300, 200), "JPEG")[:900], bomb_png(20_000, 20_000)])
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        filled(data)
