import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.networks.toxic_comment import LENGTH, as_trained, toxic_comment


def _keras(ids: list[int]) -> list[int]:
    """`texts_to_sequences` leaves unknown words out; `pad_sequences` cuts and pads in front."""
    kept = [number for number in ids if number][-LENGTH:]
    return [0] * (LENGTH - len(kept)) + kept


@given(st.lists(st.integers(0, 5), min_size=1, max_size=250), st.integers(0, 70))
def test_words_stand_where_keras_puts_them(ids: list[int], padding: int) -> None:
    (row,) = as_trained(torch.tensor([ids + [0] * padding])).tolist()
    assert row == _keras(ids)


def test_rows_do_not_mix() -> None:
    rows = [[0, 1, 2, 0], [3, 0, 0, 4], [0, 0, 0, 0]]
    assert as_trained(torch.tensor(rows)).tolist() == [_keras(row) for row in rows]


def test_six_logits_whatever_the_length() -> None:
    network = toxic_comment().eval()
    assert sum(parameter.numel() for parameter in network.parameters()) == 1_046_156
    with torch.inference_mode():
        for length in (1, 99, 100, 101, 512):
            assert network(torch.ones(3, length, dtype=torch.long), None).shape == (3, 6)


@pytest.mark.parametrize("padding", [0, 1, 300])
def test_padding_changes_nothing(padding: int) -> None:
    network = toxic_comment().eval()
    ids = [17, 4, 0, 19_999]
    with torch.inference_mode():
        alone = network(torch.tensor([ids]))
        padded = network(torch.tensor([ids + [0] * padding]))
    assert torch.equal(alone, padded)
