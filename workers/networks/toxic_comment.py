"""A small two-way LSTM that rates comments, for the worker.

Input: token ids `[rows, tokens]`, int64, and a mask, which it needs not: 0 is both padding and every unknown word. As
in training, unknown words are left out, and the last 100 known ones stand at the end of 100 places, zeros before them.
Output: logits `[rows, 6]`: toxic, severe_toxic, obscene, threat, insult, identity_hate.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 20000
LENGTH = 100
WIDTH = 50
CLASSES = 6


class ToxicComment(nn.Module):
    """Embedding → LSTM in both directions → largest of each number over all places → two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.dense = nn.Linear(2 * WIDTH, WIDTH)
        self.rating = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: ARG002 - one signature for all networks of texts
        """Token ids `[rows, tokens]` → logits `[rows, 6]`."""
        states, _ = self.lstm(self.embedding(as_trained(tokens)))
        return cast("Tensor", self.rating(functional.relu(self.dense(states.amax(1)))))


def as_trained(tokens: Tensor) -> Tensor:
    """`[rows, tokens]` with zeros anywhere → `[rows, 100]`: the last words in their order, zeros before them."""
    # Zeros first, all else in its order: left padding and leaving out are the same step.
    order = torch.sort((tokens != 0).to(torch.uint8), dim=1, stable=True).indices
    moved = tokens.gather(1, order)[:, -LENGTH:]
    return functional.pad(moved, (LENGTH - moved.shape[1], 0))


def toxic_comment() -> ToxicComment:
    """1.05 M parameters, of which 1 M are the embedding."""
    return ToxicComment()
