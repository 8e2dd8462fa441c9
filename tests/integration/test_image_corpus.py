"""Every file of Pillow's own test set: what can be decoded is right by value, and the rest is refused, each in time."""

import io
import resource
import tarfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from headrace.zoo_packages import Package, cache_of, download
from shared import images
from shared.errors import InvalidInput
from tests.support.pictures import Pixels, difference
from tests.support.skipping import cannot_run

PILLOW = Package(
    "pillow",
    "13.0.0",
    "cdcd1ba258178f7356d74170c9a81ba4eab6a5d55748bc402a5a2a6fe6be3510",
    "pillow-13.0.0.tar.gz",
    46_943_160,
)
CLOSE = 1.5
"""Of 255, on average: decoders round differently."""
SECONDS = 10.0
"""Far below `pool.job_limit_ms`, far above what any of these files needs."""
MAX_PIXELS = 20_000_000
MAX_FILE_BYTES = 3_000_000

ONLY_OURS = {"chunk_no_fctl.png", "png_decompression_dos.png", "unknown_compression_method.png"}
"""Whole pictures with something broken beside them, in a part of the file that is never opened here."""
NOT_LIKE_PILLOW = {
    "i_trns.png": "Pillow forgets which grey is transparent when there are 16 bits of it",
    "xmp_tags_orientation.avif": "AVIF's own properties say which way up it is; Pillow believes XMP",
}
REFUSED = {
    ".blp": "a turn of a Python loop for each byte of the file",
    ".icns": "the size that it tells is not that of the picture inside",
    ".cur": "the size of the picture inside has no limit",
    ".fits": "unpacks as much as the file says",
}
"""Pillow reads them, and we do not, by their names' ends; see `shared.image_rare.FORMATS`."""
NOT_LIKE_OPENCV = {
    "rot0mir0.avif": "OpenCV does not mirror what `imir` says",
    "rot0mir1.avif": "the same",
    "rot2mir0.avif": "OpenCV neither turns nor mirrors",
    "rot2mir1.avif": "the same",
    "transparency.avif": "OpenCV leaves alpha out and shows what colour lies under it",
    "rgb_trns_ycbc.j2k": "the same",
    "rgb_trns_ycbc.jp2": "the same",
}
"""Looked at by eye: `top` is at the top of ours, and in the middle there is a hole."""
MUST_FAIL = {
    "truncated_jpeg.jpg", "truncated_image.png", "broken_data_stream.png", "decompression_bomb.gif", "zero_height.j2k",
    "hopper.heif", "reqd_showpage.eps", "drawing.wmf", "negative_size.ppm",
}  # fmt: skip
READ_BY_OPENCV_TOO = (".avif", ".jp2", ".j2k", ".jpf", ".ppm", ".pgm", ".pnm")
"""Those of the rare formats for which another decoder can be asked."""


@pytest.fixture(scope="module")
def corpus() -> dict[str, bytes]:
    """All files by name, the duplicates of a name by folder, too."""
    try:
        path = download(PILLOW, cache_of(Path(__file__).parents[2] / "models"))
    except Exception as error:  # noqa: BLE001 - whatever stands between here and the registry
        cannot_run(f"Pillow's test images can't be fetched: {error}")
    files: dict[str, bytes] = {}
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            _, _, name = member.name.partition("/Tests/images/")
            content = archive.extractfile(member) if name and member.isfile() else None
            if content is not None and member.size <= MAX_FILE_BYTES:
                files[name] = content.read()
    assert len(files) > 900
    return files


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    images.configure(MAX_PIXELS)
    yield
    images.configure(50_000_000)


def expected(data: bytes) -> Pixels | None:
    """Pillow's picture with 16 bits scaled by hand; None for what it can't decode, or is over the limit."""
    with warnings.catch_warnings(action="ignore"):
        try:
            image = Image.open(io.BytesIO(data))
            if image.size[0] * image.size[1] > MAX_PIXELS:
                return None
            image.load()
            upright = ImageOps.exif_transpose(image)
            if upright.mode in {"I", "F"} or upright.mode.startswith("I;16"):
                return _by_hand(upright, image)
            if upright.has_transparency_data:
                under = Image.new("RGBA", upright.size, (255, 255, 255, 255))
                upright = Image.alpha_composite(under, upright.convert("RGBA"))
            return np.asarray(upright.convert("RGB"))
        except Exception:  # noqa: BLE001 - its readers raise OSError, ValueError, SyntaxError, NotImplementedError, …
            return None


def _by_hand(upright: Image.Image, opened: Image.Image) -> Pixels:
    values = np.asarray(upright).astype(np.float64)
    if upright.mode == "F":
        grey = values * (255 if values.max() <= 1 else 1)
    else:
        bits = getattr(opened, "tag_v2", {}).get(258, (16,))[0] if opened.format == "TIFF" else 16
        bits = 16 if bits > 16 and values.max() < 2**16 else bits
        grey = values / (2**bits - 1) * 255
    return np.clip(np.rint(grey), 0, 255).astype(np.uint8)[:, :, None].repeat(3, 2)


def decoded(data: bytes) -> Pixels | None:
    try:
        return images.decode(data)
    except InvalidInput as refused:
        assert refused.text  # noqa: PT017 - both outcomes are allowed here
        return None


def test_each_file_is_the_right_picture_or_refused_and_none_takes_long(corpus: dict[str, bytes]) -> None:
    wrong: dict[str, str] = {}
    pictures = 0
    for name, data in corpus.items():
        short, want = name.rsplit("/", maxsplit=1)[-1], expected(data)
        started_s = time.process_time()
        got = decoded(data)
        if time.process_time() - started_s > SECONDS:
            wrong[name] = f"took {time.process_time() - started_s:.0f} s"
        if want is None or got is None:
            if (want is None) != (got is None) and short not in ONLY_OURS and Path(name).suffix not in REFUSED:
                wrong[name] = "refused" if got is None else "decoded, though Pillow refuses it"
        elif got.shape != want.shape:
            wrong[name] = f"has shape {got.shape}, not {want.shape}"
        elif short not in NOT_LIKE_PILLOW and difference(got, want) >= CLOSE:
            wrong[name] = f"differs by {difference(got, want):.1f}"
        pictures += got is not None
    assert wrong == {}
    assert pictures > 830, f"only {pictures} pictures: the test looks at too little"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20, "kilobytes"


def test_what_is_broken_is_refused(corpus: dict[str, bytes]) -> None:
    known = {name.rsplit("/", maxsplit=1)[-1]: data for name, data in corpus.items()}
    assert {name for name in MUST_FAIL if name in known and decoded(known[name]) is not None} == set()
    assert len(MUST_FAIL & known.keys()) >= 7


def test_another_decoder_sees_the_same_in_the_rare_formats(corpus: dict[str, bytes]) -> None:
    """Else Pillow would only be compared with itself."""
    agree, differ = [], dict[str, float]()
    for name, data in corpus.items():
        got = decoded(data) if name.endswith(READ_BY_OPENCV_TOO) else None
        if got is None or expected(data) is None:
            continue
        other = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
        if other is None or other.shape != got.shape:
            continue  # OpenCV turns and knows fewer of them
        if difference(got, other.astype(np.uint8)) < CLOSE:
            agree.append(name)
        else:
            differ[name.rsplit("/", maxsplit=1)[-1]] = round(float(difference(got, other.astype(np.uint8))), 1)
    assert differ.keys() == NOT_LIKE_OPENCV.keys(), differ
    assert len(agree) >= 23, agree


def test_what_is_refused_by_decision_is_refused_and_named(corpus: dict[str, bytes]) -> None:
    met = {name: Path(name).suffix for name in corpus if Path(name).suffix in REFUSED}
    assert [name for name in met if decoded(corpus[name]) is not None] == []
    assert set(met.values()) == REFUSED.keys(), "a suffix that no file has"


def test_a_picture_with_a_bomb_in_its_texts_is_the_picture_without_them(corpus: dict[str, bytes]) -> None:
    data = corpus["png_decompression_dos.png"]
    texts = (b"zTXt", b"iTXt", b"tEXt", b"iCCP")
    kept, position = data[:8], 8
    while position < len(data):
        end = position + 12 + int.from_bytes(data[position : position + 4], "big")
        kept += b"" if data[position + 4 : position + 8] in texts else data[position:end]
        position = end
    assert len(kept) < len(data)
    want = expected(kept)
    assert want is not None
    assert difference(images.decode(data), want) == 0
