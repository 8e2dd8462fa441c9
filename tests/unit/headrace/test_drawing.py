import errno
from pathlib import Path

import cv2
import numpy as np
import pytest

from headrace.client_results import Detection, Label
from headrace.drawing import colour, draw, draw_file
from headrace.many_inputs import NotWritten
from tests.support.pictures import encode, photo, with_orientation

GREY = 100


def found(left: float, top: float, right: float, bottom: float, index: int = 0, name: str = "cat") -> Detection:
    return Detection(Label(index, name, 0.5), left, top, right, bottom)


def blank(width: int = 400, height: int = 300) -> np.ndarray:
    return np.full((height, width, 3), GREY, np.uint8)


def test_a_box_is_drawn_at_its_place_in_its_colour_with_a_label_above() -> None:
    drawn = draw(blank(), [found(100, 120, 300, 250, index=7)])
    mine = colour(7)
    for y, x in ((120, 200), (250, 200), (180, 100), (180, 300)):
        assert tuple(drawn[y, x]) == mine
    assert (drawn[130:240, 110:290] == GREY).all()  # the inside stays
    label = drawn[100:118, 100:150].reshape(-1, 3)
    assert {tuple(pixel) for pixel in label.tolist()} >= {mine}
    assert len(np.unique(label, axis=0)) > 3  # something is written on it


def test_labels_do_not_cover_each_other() -> None:
    same = [found(100, 120, 300, 250, index) for index in range(3)]
    drawn = draw(blank(), same)
    shown = [int((drawn == np.array(colour(index), np.uint8)).all(2).sum()) for index in range(3)]
    assert min(shown[1:]) > 300  # of the lower boxes' outlines little is left: it is their labels


def test_boxes_at_and_beyond_the_edges_keep_their_labels_inside() -> None:
    for box in ((0, 0, 400, 300), (-50, -50, 20, 20), (390, 290, 900, 900), (200, 0, 210, 1)):
        drawn = draw(blank(), [found(*map(float, box), name="a long name of a class")])
        assert (drawn != GREY).any()
    draw(blank(1, 1), [found(0, 0, 1, 1)])
    draw(blank(3000, 2), [found(0, 0, 3000, 2, name="x" * 500)])


def test_neighbouring_classes_have_colours_far_apart() -> None:
    colours = np.array([colour(index) for index in range(80)], int)
    assert np.abs(colours[1:] - colours[:-1]).sum(1).min() > 100
    assert len({tuple(each) for each in colours.tolist()}) == 80


@pytest.mark.parametrize("name", ["naïve ☕", "two\nlines", "\x1b[2J", ""])
def test_any_name_can_be_written(name: str) -> None:
    draw(blank(), [found(10, 100, 300, 250, name=name)])


def test_the_picture_is_drawn_upright(tmp_path: Path) -> None:
    source, target = tmp_path / "a.jpg", tmp_path / "b.png"
    source.write_bytes(with_orientation(photo(200, 100), "JPEG", 6))
    draw_file(source, target, [found(10, 20, 90, 190)])
    assert cv2.imread(str(target)).shape == (200, 100, 3)


def test_what_the_server_alone_can_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no picture")
    with pytest.raises(NotWritten, match="none of JPEG"):
        draw_file(tmp_path / "a.jpg", tmp_path / "b.png", [])


def test_a_picture_too_long_for_the_kind_of_file_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "a.png"
    source.write_bytes(encode(photo(16_400, 4), "PNG"))
    with pytest.raises(NotWritten, match=r"16400 × 4 pixels are too many for \.webp"):
        draw_file(source, tmp_path / "out" / "b.webp", [])
    assert not (tmp_path / "out").exists()


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "a.png", tmp_path / "out" / "b.png"
    source.write_bytes(encode(photo(20, 10), "PNG"))
    draw_file(source, target, [])
    before = target.read_bytes()
    source.write_bytes(encode(photo(60, 50), "PNG"))

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(NotWritten, match="No space left"):
        draw_file(source, target, [])
    assert target.read_bytes() == before
    assert list(target.parent.iterdir()) == [target]


def test_a_picture_is_written_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode(photo(20, 10), "PNG"))
    (tmp_path / "link.png").symlink_to(tmp_path / "real.png")
    draw_file(tmp_path / "a.png", tmp_path / "link.png", [])
    assert (tmp_path / "link.png").is_symlink()
    assert cv2.imread(str(tmp_path / "real.png")).shape == (10, 20, 3)
