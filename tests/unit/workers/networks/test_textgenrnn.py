"""The window over a state of tokens, against the network on whole windows."""

import random
from collections.abc import Iterator

import pytest
import torch

from workers.networks.textgenrnn import CONTEXT, VOCABULARY, WINDOW, TextGenRnn, Tokens, textgenrnn


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def network() -> TextGenRnn:
    torch.manual_seed(0)
    return textgenrnn().eval()


def _plain(network: TextGenRnn, tokens: list[int]) -> torch.Tensor:
    window = [0] * (WINDOW - len(tokens)) + tokens[-WINDOW:]
    return network(torch.tensor([window]))[0]


def _extend(network: TextGenRnn, state: Tokens, rows: list[tuple[list[int], int]], first_row: int = 0) -> torch.Tensor:
    most = max(len(new) for new, _ in rows)
    tokens = torch.tensor([new + [VOCABULARY - 1] * (most - len(new)) for new, _ in rows])
    counts = torch.tensor([len(new) for new, _ in rows])
    lengths = torch.tensor([length for _, length in rows])
    return network.extend(tokens, counts, lengths, state, first_row)


def test_the_published_size(network: TextGenRnn) -> None:
    assert sum(parameter.numel() for parameter in network.parameters()) == 462_717
    assert (network.context, network.vocabulary_size, network.token_bytes) == (CONTEXT, 465, 8)


def test_sequences_that_join_and_leave_at_random_come_out_as_alone(network: TextGenRnn) -> None:
    chance = random.Random(0)  # noqa: S311 - no secret
    state = network.new_state(1, 4)
    running: list[list[int]] = []
    for _ in range(20):
        joiners = [[chance.randrange(465) for _ in range(chance.randint(1, 60))] for _ in range(chance.randint(0, 2))]
        state.grow(max(len(running) + len(joiners), 1), max([len(row) for row in running + joiners], default=0) + 1)
        if joiners:
            logits = _extend(network, state, [(prompt, 0) for prompt in joiners], first_row=len(running))
            for row, prompt in enumerate(joiners):
                torch.testing.assert_close(logits[row], _plain(network, prompt))
            running += joiners
        if running:
            new = [[chance.randrange(465)] for _ in running]
            logits = _extend(network, state, [(more, len(row)) for more, row in zip(new, running, strict=True)])
            running = [row + more for row, more in zip(running, new, strict=True)]
            for row, tokens in enumerate(running):
                torch.testing.assert_close(logits[row], _plain(network, tokens))
        kept = [row for row in range(len(running)) if chance.random() < 0.8]
        chance.shuffle(kept)
        state.keep(kept)
        running = [running[row] for row in kept]


def test_a_row_can_be_doubled(network: TextGenRnn) -> None:
    state = network.new_state(3, 10)
    _extend(network, state, [([1, 2, 3], 0), ([4, 5], 0)])
    state.keep([1, 0, 1])
    logits = _extend(network, state, [([7], 2), ([8], 3), ([9], 2)])
    for row, tokens in enumerate([[4, 5, 7], [1, 2, 3, 8], [4, 5, 9]]):
        torch.testing.assert_close(logits[row], _plain(network, tokens))


def test_a_token_out_of_the_window_is_forgotten(network: TextGenRnn) -> None:
    tokens = [number % 400 for number in range(60)]
    torch.testing.assert_close(_plain(network, tokens), _plain(network, [9] * 20 + tokens[20:]))
    assert not torch.equal(_plain(network, tokens), _plain(network, [*tokens[:20], 9, *tokens[21:]]))
