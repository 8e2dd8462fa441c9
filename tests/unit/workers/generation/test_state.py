import pytest
import torch

from tests.support.tiny_llama import TinyLlama, logits_after
from workers.generation.state import Blocks, KeyValueState

CPU = torch.device("cpu")


def filled(rows: int, tokens: int) -> KeyValueState:
    """Row r, token t holds 10 r + t."""
    state = KeyValueState(Blocks(2, 3, 4), rows, tokens, CPU)
    for block in state._blocks:
        block.add_((10 * torch.arange(rows)[:, None] + torch.arange(tokens))[None, :, None, :, None])
    state._used_rows, state._used_tokens = rows, tokens
    return state


def content(state: KeyValueState) -> list[list[int]]:
    same = [block[0, :, 0, :, 0].int().tolist() for block in state._blocks]
    assert all((block == block[:1, :, :1, :, :1]).all() for block in state._blocks)
    assert same[0] == same[1]
    return list(same[0])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([0, 1, 2], [[0, 1], [10, 11], [20, 21]]),
        ([2, 0], [[20, 21], [0, 1], [0, 0]]),
        ([1, 1, 0], [[10, 11], [10, 11], [0, 1]]),
        ([2, 1, 0], [[20, 21], [10, 11], [0, 1]]),
        ([], [[0, 0], [0, 0], [0, 0]]),
    ],
)
def test_rows_move_and_what_is_left_behind_is_zero(rows: list[int], expected: list[list[int]]) -> None:
    state = filled(3, 2)
    state.keep(rows)
    assert content(state) == expected


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        ((3, 3), [[0, 1, 0], [10, 11, 0], [0, 0, 0]]),
        ((1, 4), [[0, 1, 0, 0]]),
        ((2, 1), [[0], [10]]),
        ((2, 2), [[0, 1], [10, 11]]),
    ],
)
def test_the_room_grows_and_shrinks_around_what_is_there(room: tuple[int, int], expected: list[list[int]]) -> None:
    state = filled(2, 2)
    state.grow(*room)
    assert state.room == room
    assert content(state) == expected


def test_rows_of_different_lengths_see_what_they_would_see_alone() -> None:
    network = TinyLlama()
    with torch.inference_mode():
        state = network.new_state(4, 8)

        def extend(tokens: list[list[int]], lengths: list[int], first_row: int) -> torch.Tensor:
            width = max(map(len, tokens))
            padded = torch.tensor([each + [59] * (width - len(each)) for each in tokens])
            counts = torch.tensor([len(each) for each in tokens])
            return network.extend(padded, counts, torch.tensor(lengths), state, first_row)

        extend([[1, 2, 3, 4], [5, 6]], [0, 0], 1)
        together = extend([[7], [8]], [4, 2], 1)
        torch.testing.assert_close(together[0], logits_after(network, [1, 2, 3, 4, 7]))
        torch.testing.assert_close(together[1], logits_after(network, [5, 6, 8]))
        state.keep([2, 1, 2])
        again = extend([[9], [10], [11]], [3, 5, 3], 0)
        for row, known in enumerate(([5, 6, 8, 9], [1, 2, 3, 4, 7, 10], [5, 6, 8, 11])):
            torch.testing.assert_close(again[row], logits_after(network, known))


def test_what_a_row_that_has_left_held_can_spoil_no_other_one() -> None:
    network = TinyLlama()
    with torch.inference_mode():
        state = network.new_state(2, 8)
        both = torch.tensor([[1, 2, 3], [4, 0, 0]])
        network.extend(both, torch.tensor([3, 1]), torch.tensor([0, 0]), state, 0)
        for block in state._blocks:
            block[:, 0, :, :3] = float("nan")
        state.keep([1])
        network.extend(torch.tensor([[5]]), torch.tensor([1]), torch.tensor([0]), state, 1)
        logits = network.extend(torch.tensor([[6], [7]]), torch.ones(2).long(), torch.tensor([1, 1]), state, 0)
    torch.testing.assert_close(logits[1], logits_after(network, [5, 7]))
