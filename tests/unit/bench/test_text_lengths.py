"""The mix of texts and the page of the benchmark over lengths."""

from typing import Any

import numpy as np

from bench import text_lengths
from bench.text_lengths import page, texts


def test_the_mix_is_long_tailed_and_always_the_same() -> None:
    given = texts(400)
    assert given == texts(400)
    lengths = sorted(len(text.split()) for text in given)
    assert 10 <= lengths[200] <= 18
    assert lengths[380] > 3 * lengths[200]
    assert lengths[-1] <= text_lengths.MOST_WORDS


def test_rows_are_filled_up_behind_the_text() -> None:
    row = np.array([[5, 6]], np.int32)
    assert text_lengths._filled(row, 4).tolist() == [[5, 6, -1, -1]]
    assert [len(batch) for batch in text_lengths._in_turn([row] * 70)] == [32, 32, 6]


def test_ratios_are_of_the_same_round() -> None:
    def measured(scale: float) -> dict[str, Any]:
        loops = {way.name: {"rate": scale * 10, "padding": 1.0} for way in text_lengths.LOOPS}
        servers = {way.name: {"rate": scale * 8, "rows": 9.0} for way in text_lengths.SERVERS}
        return {"tokens": 100, "lengths": [3, 4, 50], **loops, **servers}

    told = page([measured(1), measured(10), measured(2)], 3, "2 cores")
    assert "3 texts of 100 tokens: half have up to 4, one in twenty over 50, the longest 50." in told
    assert "| bare loop, sorted into lengths beforehand | 20.0 | 100 % | 1.00 × |" in told
    assert "| server, its own lengths | 16.0 |  | 0.80 × |" in told
