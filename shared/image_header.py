"""What an encoded image says about itself, read from its first bytes without decoding; needs no image library.

Pool processes call it before every decode: the pixel limit must be checked before a decoder allocates anything, and
the decoder needs to know of orientation, depth and alpha. Each format's reader sees untrusted bytes: it reads within
bounds, never loops on a length of zero, and gives up after a fixed number of steps.
"""

import re
import struct
from collections.abc import Callable

import msgspec

from shared.errors import InvalidInput
from shared.image_frames import png_chunks
from shared.tiff_tags import read_tags

_MAX_STEPS = 4096
"""Segments, chunks or blocks looked at; real files have the facts in the first dozen."""


class ImageHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an encoded image. Sizes are as stored, before `orientation` is applied."""

    format: str
    """`JPEG`, `PNG`, `WebP`, `GIF`, `BMP`, `TIFF`; of the rare ones, as Pillow calls them."""
    width: int
    height: int
    orientation: int = 1
    """EXIF: 1 upright … 8; 5 to 8 swap width and height."""
    depth: int = 8
    """Bits per channel."""
    alpha: bool = False
    """Some pixels may be transparent."""
    premultiplied: bool = False
    """Colours are already multiplied by alpha when the decoder hands them out."""
    transparent_grey: int | None = None
    """PNG: the grey value that stands for transparent, in units of `depth`."""
    animated: bool = False
    """PNG and GIF: more frames may follow, which the decoder must not see."""
    rare: bool = False
    """For Pillow (`shared.image_rare`): OpenCV does not read it, or not rightly."""


def is_usual(data: bytes | memoryview) -> bool:
    """Whether it begins like a file of a format that `read_header` knows."""
    start = bytes(memoryview(data)[:16])
    return any(matches(start) for matches, _ in _READERS)


def read_header(data: bytes | memoryview) -> ImageHeader:
    """Read the header of an encoded image. Raises InvalidInput when it is empty, of no usual format or broken."""
    if not len(data):
        raise InvalidInput("the image is empty (0 bytes)")
    view = memoryview(data)
    start = bytes(view[:16])
    for matches, reader in _READERS:
        if matches(start):
            try:
                header = reader(view)
            except (struct.error, LookupError, ValueError):
                raise InvalidInput("the image's header is truncated or broken") from None
            if header.width < 1 or header.height < 1:
                raise InvalidInput(f"the image has no pixels ({header.width} × {header.height})")
            return header
    raise InvalidInput("the image is none of JPEG, PNG, WebP, GIF, BMP, TIFF")


def undecodable(header: ImageHeader) -> InvalidInput:
    """A decoder gave up."""
    return InvalidInput(f"the image can't be decoded: its {header.format} data is truncated, broken or unsupported")


def too_large(header: ImageHeader) -> InvalidInput:
    """Memory came to an end."""
    size = f"{header.width} × {header.height} pixels of {header.format}"
    return InvalidInput(f"the image is too large to decode here: {size} need more memory than pool.memory_bytes allows")


# ------------------------------------------------------------------ JPEG

_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
_WITHOUT_LENGTH = frozenset(range(0xD0, 0xD9)) | {0x01}


def _read_jpeg(view: memoryview) -> ImageHeader:
    orientation = 1
    position = 2
    for _ in range(_MAX_STEPS):
        position = _next_marker(view, position)
        marker = view[position]
        if marker in _WITHOUT_LENGTH:
            position += 1
            continue
        length = view[position + 1] << 8 | view[position + 2]
        if marker in _START_OF_FRAME:
            depth, height, width = struct.unpack_from(">BHH", view, position + 3)
            return ImageHeader(format="JPEG", width=width, height=height, orientation=orientation, depth=depth)
        if marker == 0xE1 and bytes(view[position + 3 : position + 9]) == b"Exif\0\0":
            orientation = _orientation(view[position + 9 : position + 1 + length])
        if length < 2:
            raise ValueError("a segment that ends before it starts")
        position += 1 + length
    raise ValueError("no frame")


def _next_marker(view: memoryview, position: int) -> int:
    """Where the next marker's number is; skips fill bytes, and stray bytes between segments as decoders do."""
    found = _MARKER.search(view, position, position + _MAX_STEPS)
    if found is None:
        raise ValueError("no marker")
    return found.end() - 1


def _orientation(exif: memoryview) -> int:
    """The orientation tag of an EXIF block; 1 when it has none, or is broken: EXIF is decoration, not the image."""
    try:
        found = read_tags(exif, {274}).get(274, (1,))[0]
    except (struct.error, IndexError, ValueError):
        return 1
    return found if 1 <= found <= 8 else 1


# ------------------------------------------------------------------ PNG

_PNG_TEXTS = (b"iTXt", b"tEXt", b"zTXt")
_TURNS = re.compile(rb"\A(XML:com\.adobe\.xmp\0.*tiff:Orientation|Raw profile type exif\0)", re.DOTALL)
"""Texts in which some programs write which way up the picture is."""


def _read_png(view: memoryview) -> ImageHeader:
    if bytes(view[12:16]) != b"IHDR":
        raise ValueError("IHDR must come first")
    width, height, depth, colour, compression, filters = struct.unpack_from(">IIBBBB", view, 16)
    if compression or filters:
        raise ValueError("there is one way to compress and one to filter, number 0")
    # Colour types: 0 grey, 2 RGB, 3 palette, 4 grey + alpha, 6 RGB + alpha.
    facts: dict[str, int | bool] = {"alpha": colour in (4, 6)}
    for step, (kind, start, end) in enumerate(png_chunks(view)):
        body = view[start + 8 : end - 4]
        if kind == b"tRNS" and colour == 0:
            (facts["transparent_grey"],) = struct.unpack_from(">H", body)
        elif kind == b"tRNS":
            facts["alpha"] = True
        elif kind == b"acTL":
            facts["animated"] = True
        elif kind == b"eXIf":
            facts["orientation"] = _orientation(body)
        elif kind in _PNG_TEXTS and _TURNS.search(body):
            facts["rare"] = True
        if step >= _MAX_STEPS:
            break
    return msgspec.convert({"format": "PNG", "width": width, "height": height, "depth": depth} | facts, ImageHeader)


# ------------------------------------------------------------------ WebP


def _read_webp(view: memoryview) -> ImageHeader:
    kind = bytes(view[12:16])
    if kind == b"VP8 ":  # lossy: 3 bytes frame tag, 3 bytes start code, 14 bits each
        width, height = struct.unpack_from("<HH", view, 26)
        return ImageHeader(format="WebP", width=width & 0x3FFF, height=height & 0x3FFF)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", view, 21)
        return ImageHeader(
            format="WebP", width=(bits & 0x3FFF) + 1, height=(bits >> 14 & 0x3FFF) + 1, alpha=bool(bits >> 28 & 1)
        )
    if kind != b"VP8X":
        raise ValueError("unknown first chunk")
    flags = view[20]
    return ImageHeader(
        format="WebP",
        width=int.from_bytes(view[24:27], "little") + 1,
        height=int.from_bytes(view[27:30], "little") + 1,
        alpha=bool(flags & 0x10),
        orientation=_webp_orientation(view) if flags & 0x08 else 1,
    )


def _webp_orientation(view: memoryview) -> int:
    position = 12
    for _ in range(_MAX_STEPS):
        if position + 8 > len(view):
            break
        (length,) = struct.unpack_from("<I", view, position + 4)
        if bytes(view[position : position + 4]) == b"EXIF":
            body = view[position + 8 : position + 8 + length]
            # Some writers keep JPEG's prefix.
            return _orientation(body[6:] if bytes(body[:6]) == b"Exif\0\0" else body)
        position += 8 + length + length % 2
    return 1


# ------------------------------------------------------------------ GIF, BMP, TIFF


def _read_gif(view: memoryview) -> ImageHeader:
    width, height = struct.unpack_from("<HH", view, 6)
    return ImageHeader(format="GIF", width=width, height=height, alpha=True, animated=True)


_USUAL_MASKS = (0xFF0000, 0xFF00, 0xFF)
_ALPHA_MASK = 0xFF000000
_BMP_SIZES = (40, 52, 56, 64, 108, 124)
"""Bytes of the headers that there are, but for the oldest."""


def _read_bmp(view: memoryview) -> ImageHeader:
    (size,) = struct.unpack_from("<I", view, 14)
    if size == 12:
        width, height = struct.unpack_from("<HH", view, 18)
        return ImageHeader(format="BMP", width=width, height=height, rare=True)
    if size not in _BMP_SIZES:
        raise ValueError("no BMP header has this size")
    width, height, _, bits, compression = struct.unpack_from("<iiHHI", view, 18)
    alpha, rare = False, bits not in (24, 32)  # OpenCV cuts 5 bits a colour, and takes palettes from wrong places
    if bits == 32 and compression in (3, 6):  # the masks say where each colour's bits are
        red, green, blue = struct.unpack_from("<III", view, 54)
        (alpha_mask,) = struct.unpack_from("<I", view, 66) if size >= 56 or compression == 6 else (0,)
        if (red, green, blue) != _USUAL_MASKS or alpha_mask not in (0, _ALPHA_MASK):
            rare = True
        alpha = alpha_mask != 0
    # A height below zero: lines from the top.
    return ImageHeader(format="BMP", width=width, height=abs(height), alpha=alpha, rare=rare)


_TIFF_COLOURS = (0, 1, 2, 3, 6)
"""Grey either way, RGB, palette, YCbCr."""
_TIFF_COMPRESSIONS = (1, 5, 8, 32773, 32946)
"""None, LZW, Deflate (both numbers), PackBits."""


def _read_tiff(view: memoryview) -> ImageHeader:
    tags = read_tags(view, {256, 257, 258, 259, 262, 277, 284, 338})
    depth = max(tags.get(258, (1,)))
    is_rgb = tags.get(262, (1,))[0] == 2
    alpha = is_rgb and tags.get(277, (1,))[0] > 3
    # OpenCV 5.0 leaves memory of planes of 16 bits with alpha unwritten: an earlier image would shine through.
    rare = alpha and depth > 8 and tags.get(284, (1,))[0] == 2
    rare |= tags.get(262, (1,))[0] not in _TIFF_COLOURS or tags.get(259, (1,))[0] not in _TIFF_COMPRESSIONS
    rare |= depth not in (8, 16)
    return ImageHeader(
        format="TIFF",
        width=tags[256][0],
        height=tags[257][0],
        # The decoder turns TIFF by itself, so there is no orientation left to apply.
        orientation=1,
        rare=rare,
        depth=depth,
        alpha=alpha,
        # Up to 8 bits the decoder itself multiplies; above, ExtraSamples says what is in the file.
        premultiplied=alpha and (depth <= 8 or tags.get(338, (0,))[0] == 1),
    )


_READERS: tuple[tuple[Callable[[bytes], bool], Callable[[memoryview], ImageHeader]], ...] = (
    (lambda start: start[:3] == b"\xff\xd8\xff", _read_jpeg),
    (lambda start: start[:8] == b"\x89PNG\r\n\x1a\n", _read_png),
    (lambda start: start[:4] == b"RIFF" and start[8:12] == b"WEBP", _read_webp),
    (lambda start: start[:6] in (b"GIF87a", b"GIF89a"), _read_gif),
    (lambda start: start[:2] == b"BM", _read_bmp),
    (lambda start: start[:4] in (b"II*\0", b"MM\0*"), _read_tiff),
)
