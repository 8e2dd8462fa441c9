"""What a network that generates text implements: it extends many sequences at once, and keeps what it knows of each.

A *row* is one sequence's place in the state. The worker says which rows are extended by which tokens, and how many
tokens each row had before; the network keeps no count of its own.
"""

import abc
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn


class State(Protocol):
    """What a network remembers of the tokens so far, row by row. On the network's device."""

    def grow(self, rows: int, tokens: int) -> None:
        """Have room for so many rows of so many tokens each, more or fewer than before.

        What lies inside both the old and the new room stays. Raises torch.OutOfMemoryError, and is then as before.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was, which may occur twice; all other rows are forgotten."""


class GeneratingNetwork(nn.Module, abc.ABC):
    """Base class. The worker calls it under `torch.inference_mode()`, from one thread at a time."""

    context: int
    """Most tokens of a sequence, prompt and answer together."""
    vocabulary_size: int
    """Logits per row."""
    token_bytes: int
    """Bytes of the state per row and token."""

    @abc.abstractmethod
    def new_state(self, rows: int, tokens: int) -> State:
        """A state with room for so many rows of so many tokens, none of them known."""

    @abc.abstractmethod
    def extend(self, tokens: Tensor, counts: Tensor, lengths: Tensor, state: State, first_row: int) -> Tensor:
        """Add tokens to the rows `first_row` .. `first_row + b - 1` of the state, and say what may come next.

        `tokens` int64 `[b, t]`, left-aligned; `counts` int64 `[b]`, 1..t: how many of them each row has (what stands
        behind them means nothing); `lengths` int64 `[b]`: tokens that the row has already. All on the network's device.

        Returns float32 logits `[b, vocabulary_size]` after each row's last token. A row's logits depend on its own
        tokens alone. The same call may come again after it has raised, or for fewer rows, with the same `lengths`: what
        the state holds from there on counts for nothing.
        """
