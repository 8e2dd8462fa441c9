"""What Pillow decodes for us stays within the limits of pixels, time and memory, and says so where it can't."""

import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shared import images
from shared.errors import InvalidInput
from tests.support.pictures import bomb_png, difference, encode, photo

DECODE = """
import resource, sys
from pathlib import Path
from shared import image_rare, images
from shared.child import limit_address_space
from shared.errors import InvalidInput
image_rare.Image.new("RGB", (9, 9)).save("/dev/null", "PNG")
data = Path(sys.argv[1]).read_bytes()
if int(sys.argv[2]):
    limit_address_space(int(sys.argv[2]) << 20)
before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(images.decode(data).shape)
except InvalidInput as refused:
    print(refused.text)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb)
"""


def decoded_apart(data: bytes, folder: Path, limit_mb: int = 0) -> tuple[str, float]:
    """What a fresh process says of it, and by how many MB it grew."""
    file = folder / "image"
    file.write_bytes(data)
    argv = [sys.executable, "-c", DECODE, str(file), str(limit_mb)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    told, grown_kb = done.stdout.splitlines()
    return told, int(grown_kb) / 1024


def icon(png: bytes) -> bytes:
    """An ICO that says 16 × 16 of the picture inside."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(png), 22) + png


def icns(png: bytes) -> bytes:
    """The same of Apple's, which says 256 × 256."""
    return b"icns" + struct.pack(">I", 16 + len(png)) + b"ic08" + struct.pack(">I", 8 + len(png)) + png


@pytest.mark.parametrize("wrap", [icon, icns])
def test_a_huge_picture_in_a_small_icon_is_refused_before_it_is_decoded(
    wrap: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    told, grown_mb = decoded_apart(wrap(bomb_png(13_000, 13_000)), tmp_path)
    assert told.startswith(("the image has more pixels than", "the image is none of"))
    assert grown_mb < 30


def test_an_icon_within_the_limit_is_decoded() -> None:
    picture = photo(64, 64)
    assert difference(images.decode(icon(encode(picture, "PNG"))), np.asarray(picture)) == 0


def test_pillows_own_limit_is_as_before_afterwards() -> None:
    before = Image.MAX_IMAGE_PIXELS
    with pytest.raises(InvalidInput):
        images.decode(icon(bomb_png(13_000, 13_000)))
    images.decode(encode(photo(8, 8), "TGA"))
    assert before == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("kind", ["TGA", "PPM", "JPEG2000"])
def test_the_pixel_limit_holds_exactly_for_rare_formats(kind: str) -> None:
    images.configure(200)
    try:
        assert images.decode(encode(photo(20, 10), kind)).shape == (10, 20, 3)
        with pytest.raises(InvalidInput, match=r"pool\.max_pixels"):
            images.decode(encode(photo(67, 3), kind))
    finally:
        images.configure(50_000_000)


SLOW: dict[str, Callable[[int], bytes]] = {
    "QOI": lambda side: b"qoif" + struct.pack(">IIBB", side, side, 4, 0) + b"\xfd" * (side * side // 62 + 1),
    "PPM": lambda side: f"P3 {side} {side} 255\n".encode() + b"1 " * (side * side * 3),
}


@pytest.mark.parametrize("kind", SLOW)
def test_what_is_decoded_in_python_is_limited_to_a_megapixel(kind: str) -> None:
    started_s = time.process_time()
    with pytest.raises(InvalidInput, match=f"1500 × 1500 pixels; of {kind} in this form at most 1000000"):
        images.decode(SLOW[kind](1500))
    assert time.process_time() - started_s < 1
    assert images.decode(SLOW[kind](20)).shape == (20, 20, 3)


def test_fits_which_unpacks_what_it_likes_is_not_read() -> None:
    with pytest.raises(InvalidInput, match="the image is none of"):
        images.decode(b"SIMPLE  =                    T".ljust(80) + b"END".ljust(2800))


def test_16_bits_of_grey_need_little_more_memory_than_the_picture(tmp_path: Path) -> None:
    side = 5000
    data = b"P5 %d %d 65535\n" % (side, side) + b"\x12\x34" * (side * side)
    told, grown_mb = decoded_apart(data, tmp_path)
    assert told == f"({side}, {side}, 3)"
    assert grown_mb < 220, "75 MB of result, 100 MB of Pillow's 32 bits a pixel; float64 copies alone would be 400"


@pytest.mark.parametrize("kind", ["TGA", "TIFF", "PNG"])
def test_too_little_memory_is_not_called_a_broken_picture(kind: str, tmp_path: Path) -> None:
    picture = Image.new("RGB" if kind != "TIFF" else "CMYK", (6000, 6000))
    told, _ = decoded_apart(encode(picture, kind), tmp_path, limit_mb=60)
    assert told.startswith("the image is too large to decode here: 6000 × 6000 pixels of")
    assert "pool.memory_bytes" in told


def test_16_bit_grey_is_right_across_the_pieces() -> None:
    ramp = np.linspace(0, 65535, 700 * 900).astype(np.uint16).reshape(700, 900)
    data = b"P5 900 700 65535\n" + ramp.astype(">u2").tobytes()
    want = np.rint(ramp / 257).astype(np.uint8)[:, :, None].repeat(3, 2)
    assert np.array_equal(images.decode(data), want)


def test_transparency_is_right_across_the_pieces() -> None:
    picture = photo(900, 700).convert("RGBA")
    picture.putalpha(Image.linear_gradient("L").resize((900, 700)))
    under = Image.new("RGBA", picture.size, (9, 99, 199, 255))
    want = np.asarray(Image.alpha_composite(under, picture).convert("RGB"))
    assert np.array_equal(images.decode(encode(picture, "TGA"), (9, 99, 199)), want)


def test_orientation_in_xmp_does_not_turn_avif() -> None:
    """The format has its own way to say it, which alone counts; XMP is left over from the file's source."""
    picture = photo(60, 40)
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="3"/></x:xmpmeta>'
    plain, marked = (encode(picture, "AVIF", xmp=text) for text in (b"", xmp))
    assert np.array_equal(images.decode(plain), images.decode(marked))
