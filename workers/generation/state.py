"""A transformer's keys and values: one contiguous block per layer, of which each step reads the beginning."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """What is kept of each token."""

    layers: int
    heads: int
    """Of keys and values, which may be fewer than those of the queries."""
    size: int
    """Numbers per head."""

    @property
    def token_bytes(self) -> int:
        """Per row and token, in float32."""
        return 2 * self.layers * self.heads * self.size * 4


class Places(NamedTuple):
    """Where one call's tokens go, and what each of them sees: the same for all layers."""

    rows: Tensor
    """int64 `[n]`: row in the state of each token that counts."""
    positions: Tensor
    """int64 `[b, t]`: place of each token in its sequence."""
    counts: Tensor
    """bool `[b, t]`: whether it is one."""
    first_row: int
    longest: int
    """Of the rows, with the new tokens."""
    mask: Tensor
    """bool `[b, 1, t, longest]`: the tokens before it, and itself."""


def places(counts: Tensor, lengths: Tensor, first_row: int, width: int) -> Places:
    """For `GeneratingNetwork.extend`; `width`: how many tokens its rows have at most."""
    device = lengths.device
    positions = lengths[:, None] + torch.arange(width, device=device)
    real = torch.arange(width, device=device) < counts[:, None]
    rows = torch.arange(first_row, first_row + len(counts), device=device)[:, None].expand_as(real)[real]
    longest = int((lengths + counts).max())
    mask = torch.arange(longest, device=device) <= positions[:, :, None]
    return Places(rows, positions, real, first_row, longest, mask[:, None])


class KeyValueState:
    """See State. Float32 `[2, rows, heads, tokens, size]` per layer: keys, then values.

    What nobody has written is zero: a number that is not finite would come through the mask, as 0 times it is NaN.
    """

    def __init__(self, blocks: Blocks, rows: int, tokens: int, device: torch.device) -> None:
        self._blocks = [
            torch.zeros(2, rows, blocks.heads, tokens, blocks.size, device=device) for _ in range(blocks.layers)
        ]
        self._used_rows = self._used_tokens = 0
        """Behind these all is zero."""

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and tokens of each."""
        _, rows, _, tokens, _ = self._blocks[0].shape
        return rows, tokens

    def grow(self, rows: int, tokens: int) -> None:
        """See State. Old and new blocks are there together for a moment."""
        if (rows, tokens) == self.room:
            return
        kept_rows, kept_tokens = min(rows, self._used_rows), min(tokens, self._used_tokens)
        grown = []
        for block in self._blocks:
            new = block.new_zeros(2, rows, block.shape[2], tokens, block.shape[4])
            new[:, :kept_rows, :, :kept_tokens] = block[:, :kept_rows, :, :kept_tokens]
            grown.append(new)
        self._blocks = grown
        self._used_rows, self._used_tokens = kept_rows, kept_tokens

    def keep(self, rows: Sequence[int]) -> None:
        """See State. Only rows that move are copied."""
        moved = [place for place, row in enumerate(rows) if place != row]
        sources = [rows[place] for place in moved]
        used = self._used_tokens
        for block in self._blocks:
            if moved:
                block[:, moved, :, :used] = block[:, sources, :, :used]
            block[:, len(rows) : self._used_rows, :, :used] = 0
        self._used_rows = len(rows)
        if not rows:
            self._used_tokens = 0

    def write(self, layer: int, where: Places, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values `[b, heads, t, size]`.

        Returns those of all tokens so far, `[b, heads, longest, size]`, behind which `where.mask` lets nobody look:
        views of the state, valid until the next call of any kind.
        """
        block = self._blocks[layer]
        at = where.positions[where.counts]
        block[0, where.rows, :, at] = keys.transpose(1, 2)[where.counts].to(block.dtype)
        block[1, where.rows, :, at] = values.transpose(1, 2)[where.counts].to(block.dtype)
        last_row = where.first_row + len(where.positions)
        self._used_rows = max(self._used_rows, last_row)
        self._used_tokens = max(self._used_tokens, where.longest)
        known = block[:, where.first_row : last_row, :, : where.longest]
        return known[0], known[1]

    def __repr__(self) -> str:
        return f"<KeyValueState room={self.room} used={self._used_rows, self._used_tokens}>"
