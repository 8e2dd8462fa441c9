import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidInput
from shared.image_header import read_header
from tests.support.pictures import encode, photo, with_orientation

KINDS = ["JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF"]
FILES = {kind: encode(photo(70, 50), kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_format_and_size_are_read_without_decoding(kind: str) -> None:
    header = read_header(FILES[kind])
    assert (header.format, header.width, header.height, header.orientation) == (kind, 70, 50, 1)


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"restart_marker_blocks": 2}, {"comment": b"\xff\xff" * 99}]
)
def test_jpeg_variants(options: dict[str, object]) -> None:
    header = read_header(encode(photo(70, 50), "JPEG", **options))
    assert (header.width, header.height) == (70, 50)


def test_stray_bytes_between_jpeg_segments_are_skipped() -> None:
    data = FILES["JPEG"]
    assert read_header(data[:2] + b"\xff\xff" + data[2:]).width == 70
    assert read_header(data[:20] + b"stray\xff\x00" + data[20:]).width == 70


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("lossless", [False, True])
def test_all_three_kinds_of_webp(mode: str, lossless: bool) -> None:
    image = photo(70, 50).convert(mode)
    if mode == "RGBA":
        image.putpixel((3, 3), (1, 2, 3, 4))
    header = read_header(encode(image, "WebP", lossless=lossless))
    assert (header.width, header.height, header.alpha) == (70, 50, mode == "RGBA")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP"])
def test_orientation_is_read(kind: str, orientation: int) -> None:
    header = read_header(with_orientation(photo(70, 50), kind, orientation))
    assert (header.orientation, header.width, header.height) == (orientation, 70, 50)


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_nonsense_orientation_counts_as_upright(value: int) -> None:
    assert read_header(with_orientation(photo(70, 50), "JPEG", value)).orientation == 1


def test_broken_exif_does_not_spoil_the_image() -> None:
    data = FILES["JPEG"]
    for exif in (b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
        assert read_header(data[:2] + segment + data[2:]).orientation == 1


def test_depth_alpha_and_transparent_grey_of_png() -> None:
    grey = photo(70, 50).convert("L")
    assert read_header(encode(grey.convert("I;16"), "PNG")).depth == 16
    assert read_header(encode(grey.convert("1"), "PNG")).depth == 1
    assert read_header(encode(grey.convert("LA"), "PNG")).alpha
    assert read_header(encode(photo(70, 50).quantize(8), "PNG", transparency=3)).alpha
    assert read_header(encode(grey, "PNG", transparency=7)).transparent_grey == 7
    assert not read_header(FILES["PNG"]).alpha


def test_tiff_alpha_is_premultiplied_by_the_decoder() -> None:
    header = read_header(encode(photo(70, 50).convert("RGBA"), "TIFF"))
    assert header.alpha
    assert header.premultiplied
    assert not read_header(encode(photo(70, 50).convert("CMYK"), "TIFF")).alpha


def test_planar_16_bit_tiff_with_alpha_is_not_for_opencv() -> None:
    # OpenCV 5.0 returns unwritten memory for it.
    entries = [(256, 4, 70), (257, 4, 50), (258, 3, 16), (262, 3, 2), (277, 3, 4), (284, 3, 2)]
    body = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    data = b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + bytes(4)
    assert read_header(data).rare


def test_bmp_from_the_top_and_with_old_header() -> None:
    top_down = bytearray(FILES["BMP"])
    struct.pack_into("<i", top_down, 22, -50)
    assert read_header(top_down).height == 50
    old = b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 70, 50, 1, 24)
    assert (read_header(old).width, read_header(old).height) == (70, 50)


def test_bmp_with_colours_in_unusual_order_is_not_for_opencv() -> None:
    data = b"BM" + bytes(12) + struct.pack("<IiiHHI", 40, 70, 50, 1, 32, 3) + bytes(20) + struct.pack("<III", 1, 2, 4)
    assert read_header(data).rare


def test_empty() -> None:
    with pytest.raises(InvalidInput, match="empty"):
        read_header(b"")


@pytest.mark.parametrize("data", [b"x", b"not an image at all", b"<svg/>", bytes(100), b"\xff\xd8", b"RIFFxxxxWAVE"])
def test_no_known_format(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="none of JPEG, PNG, WebP, GIF, BMP, TIFF"):
        read_header(data)


@pytest.mark.parametrize(("kind", "length"), [*((kind, 20) for kind in KINDS if kind != "GIF"), ("GIF", 9)])
def test_a_cut_header_is_refused(kind: str, length: int) -> None:
    with pytest.raises(InvalidInput, match="truncated or broken"):
        read_header(FILES[kind][:length])


def test_an_image_without_pixels_is_refused() -> None:
    data = bytearray(FILES["GIF"])
    struct.pack_into("<HH", data, 6, 0, 50)
    with pytest.raises(InvalidInput, match="no pixels"):
        read_header(data)


def test_a_jpeg_of_segments_without_end_is_given_up() -> None:
    with pytest.raises(InvalidInput, match="header"):
        read_header(b"\xff\xd8" + b"\xff\xe0\x00\x02" * 100_000)


@given(st.sampled_from(KINDS), st.binary(max_size=64), st.integers(0, 80))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_a_header_or_invalid_input(kind: str, noise: bytes, at: int) -> None:
    data = bytearray(FILES[kind])
    data[at : at + len(noise)] = noise
    try:
        header = read_header(bytes(data))
    except InvalidInput:
        return
    assert header.width > 0
    assert header.height > 0
    assert 1 <= header.orientation <= 8


def test_views_are_read_in_place() -> None:
    padded = memoryview(b"xx" + FILES["PNG"] + b"yy")[2:-2]
    assert read_header(padded).width == 70
