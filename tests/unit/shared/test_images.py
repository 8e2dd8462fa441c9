import io
import time
from collections.abc import Iterator

import cv2
import numpy as np
import pytest
from PIL import Image

from shared import images
from shared.errors import InvalidInput
from shared.image_header import ImageHeader, read_header
from tests.support.pictures import (
    Pixels,
    bicubic_crop,
    bomb_png,
    difference,
    encode,
    photo,
    reference,
    with_orientation,
)

RAINBOW = photo(203, 151)
GREY_RAMP = Image.fromarray(np.tile(np.linspace(0, 65535, 203).astype(np.uint16), (151, 1)))
ALPHA_RAMP = Image.fromarray(np.tile(np.linspace(0, 255, 203).astype(np.uint8), (151, 1)))


def translucent() -> Image.Image:
    image = RAINBOW.convert("RGBA")
    image.putalpha(ALPHA_RAMP)
    return image


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    images.configure(50_000_000)
    yield
    images.configure(50_000_000)


# ------------------------------------------------------------------ right by value, next to Pillow


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 90}),
        ("JPEG", {"quality": 90, "progressive": True}),
        ("PNG", {}),
        ("WebP", {"quality": 90}),
        ("WebP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "jpeg"}),
    ],
)
def test_colours(kind: str, options: dict[str, object]) -> None:
    data = encode(RAINBOW, kind, **options)
    assert difference(images.decode(data), reference(data)) < 0.5


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF"])
def test_grey(kind: str) -> None:
    data = encode(RAINBOW.convert("L"), kind)
    assert difference(images.decode(data), reference(data)) < 0.5


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_including_adobes_inverted_form(kind: str) -> None:
    # Pillow writes JPEG the way Adobe does: inverted, with an Adobe marker.
    data = encode(RAINBOW.convert("CMYK"), kind)
    assert (b"Adobe" in data) == (kind == "JPEG")
    assert difference(images.decode(data), reference(data)) < 1.0


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_are_scaled_not_clipped(kind: str) -> None:
    ours = images.decode(encode(GREY_RAMP, kind))
    expected = np.round(np.asarray(GREY_RAMP) / 257)
    assert np.abs(ours[:, :, 0] - expected).max() <= 1
    assert (ours[0, 0], ours[0, -1]) == (pytest.approx([0, 0, 0]), pytest.approx([255, 255, 255]))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF"])
def test_palette(kind: str) -> None:
    data = encode(RAINBOW.quantize(16), kind)
    assert difference(images.decode(data), reference(data)) == 0


def test_one_bit_per_pixel() -> None:
    data = encode(RAINBOW.convert("1"), "PNG")
    assert difference(images.decode(data), reference(data)) == 0


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (10, 200, 30)])
@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WebP", {"lossless": True, "exact": True}), ("TIFF", {})])
def test_alpha_shows_the_background(kind: str, options: dict[str, object], background: tuple[int, int, int]) -> None:
    data = encode(translucent(), kind, **options)
    ours, theirs = images.decode(data, background), reference(data, background)
    assert np.abs(ours.astype(int) - theirs).max() <= 2
    assert tuple(ours[75, 0]) == background  # fully transparent on the left


def test_opaque_alpha_changes_nothing() -> None:
    assert difference(images.decode(encode(RAINBOW.convert("RGBA"), "PNG")), np.asarray(RAINBOW)) == 0


def test_grey_with_alpha() -> None:
    image = RAINBOW.convert("LA")
    image.putalpha(ALPHA_RAMP)
    data = encode(image, "PNG")
    assert np.abs(images.decode(data).astype(int) - reference(data)).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_transparent_palette_entry(kind: str) -> None:
    data = encode(RAINBOW.quantize(16), kind, transparency=5)
    assert difference(images.decode(data, (1, 2, 3)), reference(data, (1, 2, 3))) == 0


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_transparent_colour_of_png(mode: str) -> None:
    image = RAINBOW.convert(mode)
    data = encode(image, "PNG", transparency=image.getpixel((9, 9)))
    ours = images.decode(data, (1, 2, 3))
    assert tuple(ours[9, 9]) == (1, 2, 3)
    assert difference(ours, reference(data, (1, 2, 3))) == 0


def test_transparent_white_of_a_1_bit_png() -> None:
    image = RAINBOW.convert("1")
    ours = images.decode(encode(image, "PNG", transparency=1), (1, 2, 3))
    expected = np.where(np.asarray(image)[:, :, None], (1, 2, 3), (0, 0, 0))
    assert np.array_equal(ours, expected)


def test_transparent_16_bit_grey_of_png() -> None:
    value = int(np.asarray(GREY_RAMP)[0, 100])
    data = encode(GREY_RAMP, "PNG", transparency=value)
    ours = images.decode(data, (1, 2, 3))
    assert tuple(ours[0, 100]) == (1, 2, 3)
    assert tuple(ours[0, 202]) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WebP", "TIFF"])
def test_of_an_animation_the_first_frame(kind: str) -> None:
    frames = [RAINBOW.rotate(90), RAINBOW.rotate(180)]
    options = {"lossless": True} if kind == "WebP" else {}
    data = encode(RAINBOW, kind, save_all=True, append_images=frames, **options)
    ours = images.decode(data)
    assert difference(ours, reference(data)) < 0.5
    assert difference(ours, np.asarray(RAINBOW)) < 12  # GIF has 256 colours


def test_first_gif_frame_keeps_its_transparency_whatever_later_frames_do() -> None:
    first, second = RAINBOW.quantize(16), RAINBOW.rotate(180).quantize(16)
    data = encode(first, "GIF", save_all=True, append_images=[second], transparency=3, disposal=2)
    assert difference(images.decode(data), reference(data)) == 0


# ------------------------------------------------------------------ orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP", "TIFF"])
def test_orientation(kind: str, orientation: int) -> None:
    data = with_orientation(RAINBOW, kind, orientation)
    ours = images.decode(data)
    assert difference(ours, reference(data)) < 0.5
    assert ours.flags.c_contiguous


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_a_crop(orientation: int) -> None:
    data = with_orientation(photo(400, 300), "JPEG", orientation)
    ours = crop(data, 96)
    assert difference(ours, bicubic_crop(data, 96)) < 2
    assert difference(ours, np.ascontiguousarray(ours[::-1])) > 10  # the picture has no symmetry to hide behind


# ------------------------------------------------------------------ scaling


def crop(data: bytes, size: int, crop_fraction: float = 0.875) -> Pixels:
    out = np.zeros((size, size, 3), np.uint8)
    images.fill_crop(data, out, crop_fraction)
    return out


@pytest.mark.parametrize(
    ("width", "height"),
    [
        (500, 375),
        (375, 500),
        (224, 224),
        (256, 256),
        (512, 512),
        (513, 777),
        (1027, 641),
        (2051, 2049),
        (100, 80),
        (31, 57),
    ],
)
def test_crop_agrees_with_a_bicubic_reference(width: int, height: int) -> None:
    data = encode(photo(width, height), "JPEG", quality=92)
    assert difference(crop(data, 224), bicubic_crop(data, 224)) < 1.5


@pytest.mark.parametrize(("width", "height"), [(512, 512), (513, 777), (1027, 641), (1111, 2049), (2051, 2049)])
def test_reduced_decode_agrees_with_full_decode(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(photo(width, height, seed=3), "JPEG", quality=92)
    reduced = crop(data, 224)
    assert images.reduction(read_header(data), 256) > 1
    monkeypatch.setattr(images, "reduction", lambda _header, _short: 1)
    assert difference(reduced, crop(data, 224)) < 1.0


@pytest.mark.parametrize(
    ("short", "by"), [(511, 1), (512, 2), (1023, 2), (1024, 4), (2047, 4), (2048, 8), (50_000, 8), (100, 1)]
)
def test_reduction_starts_at_twice_the_need(short: int, by: int) -> None:
    assert images.reduction(ImageHeader(format="JPEG", width=short + 7, height=short), 256) == by
    assert images.reduction(ImageHeader(format="JPEG", width=short, height=short + 7), 256) == by


def test_other_formats_are_never_reduced() -> None:
    assert images.reduction(ImageHeader(format="PNG", width=9000, height=9000), 64) == 1


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 1), (1, 4000), (4000, 1), (3, 2)])
def test_tiny_and_very_long_images(width: int, height: int) -> None:
    started_s = time.process_time()
    out = crop(encode(Image.new("RGB", (width, height), (200, 100, 50)), "PNG"), 224)
    assert np.abs(out.astype(int) - (200, 100, 50)).max() <= 1
    assert time.process_time() - started_s < 1


def test_the_whole_image_is_scaled_without_a_crop() -> None:
    data = encode(photo(300, 300), "PNG")
    assert difference(crop(data, 100, crop_fraction=1), bicubic_crop(data, 100, crop_fraction=1)) < 1


# ------------------------------------------------------------------ refused


def test_the_limit_is_checked_before_decoding() -> None:
    data = bomb_png(30_000, 30_000, lines=9)
    started_s = time.process_time()
    with pytest.raises(InvalidInput, match=r"30000 × 30000 pixels, more than pool\.max_pixels \(50000000\)"):
        images.decode(data)
    assert time.process_time() - started_s < 0.1


def test_the_limit_counts_pixels_exactly() -> None:
    images.configure(200)
    assert images.decode(encode(photo(20, 10), "PNG")).shape == (10, 20, 3)
    with pytest.raises(InvalidInput, match="max_pixels"):
        images.decode(encode(photo(67, 3), "PNG"))


TRUNCATABLE = {
    "jpeg": encode(RAINBOW, "JPEG"),
    "progressive": encode(RAINBOW, "JPEG", progressive=True),
    "cmyk": encode(RAINBOW.convert("CMYK"), "JPEG"),
    "png": encode(RAINBOW, "PNG"),
    "alpha": encode(translucent(), "PNG"),
    "apng": encode(RAINBOW, "PNG", save_all=True, append_images=[RAINBOW.rotate(90)]),
    "webp": encode(RAINBOW, "WebP"),
    "gif": encode(RAINBOW.quantize(64), "GIF"),
    "bmp": encode(RAINBOW, "BMP"),
    "tiff": encode(RAINBOW, "TIFF"),
    "tiff-lzw": encode(RAINBOW, "TIFF", compression="tiff_lzw"),
}


@pytest.mark.parametrize("name", TRUNCATABLE)
def test_a_truncated_image_is_never_half_an_image(name: str) -> None:
    data = TRUNCATABLE[name]
    whole = images.decode(data)
    for length in range(1, len(data), max(1, len(data) // 40)):
        try:
            image = images.decode(data[:length])
        except InvalidInput as refused:
            assert refused.text.startswith("the image")  # noqa: PT017 - both outcomes are allowed at the last bytes
        else:
            assert np.array_equal(image, whole), f"{name} cut to {length} of {len(data)} bytes"


def test_the_sentence_over_a_broken_image_names_its_format() -> None:
    with pytest.raises(InvalidInput, match="its JPEG data is truncated, broken or unsupported"):
        images.decode(TRUNCATABLE["jpeg"][:-2000])


HOSTILE = {
    "jpeg of stray bytes": (b"\xff\xd8\xff\xe0\x00\x02" + (b"\xff\x00" * 2000 + b"\xff\xe0\x00\x02") * 2000),
    "jpeg of fill bytes": b"\xff\xd8" + b"\xff" * 4_000_000,
    "png of empty chunks": (
        encode(RAINBOW, "PNG", save_all=True, append_images=[RAINBOW.rotate(90)])[:-12]
        + (bytes(4) + b"xxxx" + bytes(4)) * 400_000
    ),
    "gif of tiny blocks": b"GIF89a\x08\x00\x08\x00\x00\x00\x00" + b"\x21\xfe" + b"\x01x" * 3_000_000,
    "gif of empty extensions": b"GIF89a\x08\x00\x08\x00\x00\x00\x00" + b"\x21\xfe\x00" * 1_000_000,
    "gif without end": b"GIF89a\x08\x00\x08\x00\x00\x00\x00" + b"\x2c" + bytes(9) + b"\x02" + b"\x01x" * 3_000_000,
    "tiff of many tags": b"II*\0\x08\0\0\0\xff\xff" + bytes(12 * 65535),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_made_to_keep_the_header_reader_busy_are_given_up_soon(name: str) -> None:
    started_s = time.process_time()
    with pytest.raises(InvalidInput):
        images.decode(HOSTILE[name])
    assert time.process_time() - started_s < 0.5


def test_16_bit_tiff_with_alpha() -> None:
    pixels = np.full((4, 6, 4), 257, np.uint16) * np.array([51, 102, 204, 128], np.uint16)  # BGRA
    data = cv2.imencode(".tif", pixels)[1].tobytes()
    assert images.decode(data, (0, 0, 0))[0, 0].tolist() == [102, 51, 26]
    assert images.decode(data, (255, 255, 255))[0, 0].tolist() == [229, 178, 153]


@pytest.mark.parametrize("white", [1.0, 255.0])
def test_grey_in_fractions_is_of_one_or_of_255(white: float) -> None:
    grey = np.linspace(0, 1, 203, dtype=np.float32)[None].repeat(151, 0)
    data = encode(Image.fromarray(grey * np.float32(white)), "TIFF")
    assert difference(images.decode(data), np.rint(grey * 255)[:, :, None].repeat(3, 2).astype(np.uint8)) < 0.1


def test_an_earlier_image_never_shines_through() -> None:
    secret = encode(photo(203, 151, seed=9), "JPEG", quality=95)
    broken = encode(RAINBOW, "JPEG", quality=95)
    # Cut in the middle, with an end marker: libjpeg fills what is missing.
    cut = broken[: len(broken) // 2] + b"\xff\xd9"
    outcomes = set()
    for _ in range(50):
        images.decode(secret)
        try:
            outcomes.add(images.decode(cut).tobytes())
        except InvalidInput:
            outcomes.add(b"refused")
    images.decode(encode(Image.new("RGB", (203, 151)), "JPEG"))
    try:
        outcomes.add(images.decode(cut).tobytes())
    except InvalidInput:
        outcomes.add(b"refused")
    assert len(outcomes) == 1


def test_arena_views_are_decoded_in_place() -> None:
    data = encode(RAINBOW, "PNG")
    view = memoryview(b"before" + data + b"after")[6:-5].toreadonly()
    assert difference(images.decode(view), np.asarray(RAINBOW)) == 0
    assert Image.open(io.BytesIO(bytes(view))).size == (203, 151)
