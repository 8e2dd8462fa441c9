"""Images for tests, made here: encoded by Pillow, which the product does not use, so that it can be the reference."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

Pixels = npt.NDArray[np.uint8]

_ALMOST_LOSSLESS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 95, "subsampling": 0},
    "WebP": {"lossless": True},
}


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth colourful picture without symmetry: a few random colours, enlarged."""
    colours = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:  # noqa: ANN401 - whatever Pillow's writers take
    """The picture as a file of that kind (`JPEG`, `PNG`, …)."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_orientation(image: Image.Image, kind: str, orientation: int) -> bytes:
    """The picture as it would lie in a file whose EXIF says `orientation`; upright it is `image` again."""
    exif = Image.Exif()
    exif[274] = orientation
    options = _ALMOST_LOSSLESS.get(kind, {})
    return encode(image, kind, exif=exif, **options)


def reference(data: bytes, background: tuple[int, int, int] = (255, 255, 255)) -> Pixels:
    """What Pillow makes of it: first frame, upright, over the background, RGB."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode in {"RGBA", "LA", "PA"} or "transparency" in image.info:
        under = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(under, image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def bicubic_crop(data: bytes, size: int, crop_fraction: float = 0.875) -> Pixels:
    """The reference of the acceptance test: Pillow's bicubic resize of the shorter side, centre crop."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    scale = round(size / crop_fraction) / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    scaled = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(scaled.crop((left, top, left + size, top + size)))


def bomb_png(width: int, height: int, lines: int | None = None) -> bytes:
    """A 1-bit PNG of that size, all black: a small file even when the image is huge. `lines`: cut after so many."""
    packer = zlib.compressobj(9)
    line = bytes(1 + (width + 7) // 8)
    pixels = b"".join(packer.compress(line) for _ in range(lines or height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def difference(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> float:
    """Mean absolute difference in units of 0..255. Raises ValueError when the sizes differ."""
    if ours.shape != theirs.shape:
        raise ValueError(f"{ours.shape} is not {theirs.shape}")
    return float(np.abs(ours.astype(int) - theirs.astype(int)).mean())
