"""A network like Llama, tiny and with random weights: for tests of what generates text around it."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.generation.network import GeneratingNetwork, State
from workers.generation.state import Blocks, KeyValueState, places

POISON, NOT_A_NUMBER = 61, 62
"""Tokens on which a `Touchy` network raises, or gives NaN for their rows."""
ENDS = 63


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, number: int) -> None:
        super().__init__()
        self.heads, self.number = heads, number
        self.before_attention, self.before_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def _split(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        return x.view(rows, tokens, self.heads, width // self.heads).transpose(1, 2)


class TinyLlama(GeneratingNetwork):
    """Rotary positions, RMS norms, SwiGLU, and a key-value cache of the worker's."""

    def __init__(self, *, context: int = 48, vocabulary: int = 64, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        width, heads = 16, 2
        self.context, self.vocabulary_size = context, vocabulary
        self.blocks = Blocks(layers, heads, width // heads)
        self.token_bytes = self.blocks.token_bytes
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Layer(width, heads, number) for number in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
        self.requires_grad_(requires_grad=False)

    def new_state(self, rows: int, tokens: int) -> KeyValueState:
        """See GeneratingNetwork."""
        return KeyValueState(self.blocks, rows, tokens, self.head.weight.device)

    def extend(self, tokens: Tensor, counts: Tensor, lengths: Tensor, state: State, first_row: int) -> Tensor:
        """See GeneratingNetwork."""
        assert isinstance(state, KeyValueState)
        where = places(counts, lengths, first_row, tokens.shape[1])
        x = self.embedding(tokens)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            y = layer.before_attention(x)
            query, key, value = (layer._split(each(y)) for each in (layer.query, layer.key, layer.value))
            query, key = _turned(query, where.positions), _turned(key, where.positions)
            keys, values = state.write(layer.number, where, key, value)
            seen = functional.scaled_dot_product_attention(query, keys, values, attn_mask=where.mask)
            x = x + layer.out(seen.transpose(1, 2).flatten(2))
            y = layer.before_feed(x)
            x = x + layer.down(functional.silu(layer.gate(y)) * layer.up(y))
        last = x[torch.arange(len(x), device=x.device), counts - 1]
        logits: Tensor = self.head(self.norm(last)).float()
        return logits


class Touchy(TinyLlama):
    """Raises on POISON; what it knows of a row turns into NaN with NOT_A_NUMBER."""

    def extend(self, tokens: Tensor, counts: Tensor, lengths: Tensor, state: State, first_row: int) -> Tensor:
        """See the class."""
        real = torch.arange(tokens.shape[1]) < counts[:, None]
        if bool(((tokens == POISON) & real).any()):
            # As a network may that fails half-way: the state has been written to.
            super().extend(tokens, counts, lengths, state, first_row)
            raise RuntimeError("a token that this network can't stand")
        logits = super().extend(tokens, counts, lengths, state, first_row)
        spoilt = ((tokens == NOT_A_NUMBER) & real).any(1)
        if bool(spoilt.any()):
            assert isinstance(state, KeyValueState)
            for block in state._blocks:
                block[:, first_row : first_row + len(tokens), :, : state._used_tokens][:, spoilt] = float("nan")
            logits[spoilt] = float("nan")
        return logits


class Slow(TinyLlama):
    """Takes 20 ms for each step."""

    def extend(self, tokens: Tensor, counts: Tensor, lengths: Tensor, state: State, first_row: int) -> Tensor:
        """See the class."""
        time.sleep(0.02)  # stands for a larger network
        return super().extend(tokens, counts, lengths, state, first_row)


def _turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of `[b, heads, t, size]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * (100.0 ** -(torch.arange(half, device=x.device) / half))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


@torch.inference_mode()
def logits_after(network: GeneratingNetwork, tokens: Sequence[int]) -> Tensor:
    """Float32 `[vocabulary]`: alone, at once, with an empty state. What everything else is compared with."""
    state = network.new_state(1, len(tokens))
    counts, lengths = torch.tensor([len(tokens)]), torch.tensor([0])
    return network.extend(torch.tensor([list(tokens)]), counts, lengths, state, 0)[0]


def greedy(network: GeneratingNetwork, prompt: Sequence[int], count: int, ends: Sequence[int] = (ENDS,)) -> list[int]:
    """The likeliest tokens one after another, each computed from scratch; the end token is the last one."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count and len(tokens) < network.context:
        tokens.append(int(logits_after(network, tokens).argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]
