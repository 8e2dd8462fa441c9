"""Small files of every format, and ways to damage them."""

import random

from tests.support.pictures import encode, photo

SMALL = photo(40, 30)
CORPUS = [
    encode(SMALL, "JPEG"),
    encode(SMALL, "JPEG", progressive=True),
    encode(SMALL.convert("CMYK"), "JPEG"),
    encode(SMALL, "PNG"),
    encode(SMALL.convert("RGBA"), "PNG"),
    encode(SMALL.quantize(16), "PNG", transparency=3),
    encode(SMALL, "PNG", save_all=True, append_images=[SMALL.rotate(90)]),
    encode(SMALL, "WebP"),
    encode(SMALL, "WebP", lossless=True),
    encode(SMALL, "WebP", save_all=True, append_images=[SMALL.rotate(90)]),
    encode(SMALL, "GIF", save_all=True, append_images=[SMALL.rotate(90)]),
    encode(SMALL.quantize(16), "BMP"),
    encode(SMALL, "TIFF"),
    encode(SMALL.convert("RGBA"), "TIFF", compression="tiff_lzw"),
    encode(SMALL.convert("I;16"), "TIFF"),
    encode(SMALL, "TIFF", compression="jpeg"),
]


def damaged(data: bytes, seed: int) -> bytes:
    """The file with a few bytes changed, left out or put in; headers are hit as often as everything else."""
    random_ = random.Random(seed)  # noqa: S311 - a test must be repeatable
    out = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 8))):
        at = random_.randrange(min(len(out), random_.choice((64, len(out)))))
        length = random_.randrange(1, 9)
        out[at : at + random_.choice((length, 0, 1))] = random_.randbytes(random_.choice((length, 0, 1)))
        out = out or bytearray(b"\0")
    return bytes(out)
