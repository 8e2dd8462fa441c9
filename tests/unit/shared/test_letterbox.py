import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.letterbox import fit

side = st.integers(1, 65_535)


@given(side, side, st.integers(1, 2048))
def test_the_picture_lies_inside_in_the_middle_with_its_shape(width: int, height: int, size: int) -> None:
    place = fit(width, height, size)
    assert max(place.inner_width, place.inner_height) == size
    assert min(place.inner_width, place.inner_height) >= 1
    for before, inner in ((place.left, place.inner_width), (place.top, place.inner_height)):
        assert before >= 0
        after = size - before - inner
        assert after - before in (0, 1)
    scale = size / max(width, height)
    assert abs(place.inner_width - max(1, width * scale)) <= 0.5 + 1e-9
    assert abs(place.inner_height - max(1, height * scale)) <= 0.5 + 1e-9


@given(side, side, st.integers(1, 2048))
def test_the_place_is_the_whole_picture(width: int, height: int, size: int) -> None:
    place = fit(width, height, size)
    whole = np.array(
        [[place.left, place.top, place.left + place.inner_width, place.top + place.inner_height]], np.float64
    )
    assert np.allclose(place.to_picture(whole), [[0, 0, width, height]])
    everything = np.array([[-1e4, -1e4, 1e4, 1e4]])
    assert place.to_picture(everything).tolist() == [[0, 0, width, height]]  # cut at the edges, exactly
