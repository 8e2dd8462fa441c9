"""The network of textgenrnn, for the worker: a character model of two LSTMs that looks at the last 40 characters.

What it was trained on was always 40 tokens, short texts with zeros in front, so each step runs the whole window anew:
there is nothing to keep but the tokens.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from workers.generation.network import GeneratingNetwork, State

WINDOW = 40
VOCABULARY = 465
EMBEDDING = 100
UNITS = 128
CONTEXT = 1024
"""Of prompt and answer. The network knows no end; a title has no more characters than this."""


class Tokens:
    """The tokens of each row so far. Behind the last place there is one more, where padding is written."""

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        self.values = torch.zeros(rows, tokens + 1, dtype=torch.int64, device=device)

    def grow(self, rows: int, tokens: int) -> None:
        """See `workers.generation.network.State`."""
        old = self.values
        new = old.new_zeros(rows, tokens + 1)
        kept_rows, kept = min(rows, old.shape[0]), min(tokens, old.shape[1] - 1)
        new[:kept_rows, :kept] = old[:kept_rows, :kept]
        self.values = new

    def keep(self, rows: Sequence[int]) -> None:
        """See `workers.generation.network.State`."""
        self.values[: len(rows)] = self.values[list(rows)]


class TextGenRnn(GeneratingNetwork):
    """Embedding, two LSTMs, an average of all three by attention over the window, one linear layer."""

    context = CONTEXT
    vocabulary_size = VOCABULARY
    token_bytes = 8

    def __init__(self) -> None:
        super().__init__()
        width = EMBEDDING + 2 * UNITS
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDING)
        self.rnn_1 = nn.LSTM(EMBEDDING, UNITS, batch_first=True)
        self.rnn_2 = nn.LSTM(UNITS, UNITS, batch_first=True)
        self.attention = nn.Linear(width, 1, bias=False)
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, window: Tensor) -> Tensor:
        """`[rows, 40]`, zeros in front of a short text → float32 logits `[rows, 465]` of the character that follows."""
        embedded = self.embedding(window)
        first, _ = self.rnn_1(embedded)
        second, _ = self.rnn_2(first)
        parts = torch.cat([embedded, first, second], dim=2)
        weights = self.attention(parts).softmax(dim=1)
        return cast("Tensor", self.output((parts * weights).sum(dim=1)).float())

    def new_state(self, rows: int, tokens: int) -> Tokens:
        """See GeneratingNetwork."""
        return Tokens(rows, tokens, self.output.weight.device)

    def extend(self, tokens: Tensor, counts: Tensor, lengths: Tensor, state: State, first_row: int) -> Tensor:
        """See GeneratingNetwork."""
        held = cast("Tokens", state).values[first_row : first_row + len(tokens)]
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        places = torch.where(columns < counts[:, None], lengths[:, None] + columns, held.shape[1] - 1)
        held.scatter_(1, places, tokens)
        back = (lengths + counts)[:, None] + torch.arange(-WINDOW, 0, device=tokens.device)
        return cast("Tensor", self(held.gather(1, back.clamp(min=0)) * (back >= 0)))


def textgenrnn() -> TextGenRnn:
    """0.46 M parameters, trained on titles of Reddit posts."""
    return TextGenRnn()
