"""Networks of the Llama kind, for the worker: RMS norm, rotary positions, grouped queries, SwiGLU.

Parameter names are those in which such checkpoints are published (`model.layers.0.self_attn.q_proj.weight`, …).
`extend` is what the worker runs, with a key-value cache; `forward` is the plain network over whole rows, without one:
what the first is measured against.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.generation.network import GeneratingNetwork, State
from workers.generation.state import Blocks, KeyValueState, Places, places

CHUNK_TOKENS = 512
"""New tokens of a row that run at a time: a longer prompt goes chunk by chunk, so that the mask and what lies between
two layers stay small (a mask of 9 heads × 512 × 8192 tokens)."""


class LlamaShape(NamedTuple):
    """What tells one network of this kind from another."""

    layers: int
    width: int
    heads: int
    key_heads: int
    """Each serves `heads / key_heads` query heads."""
    inner: int
    """Width inside the feed-forward part."""
    vocabulary: int
    context: int
    """Most tokens of prompt and answer together."""
    rope_base: float = 10000.0
    rope_pairs: bool = False
    """Which two numbers of a head turn together: neighbours, as in GGUF files, or each with the one half a head on, as
    in checkpoints of `transformers`. The weights were laid out for one of the two; with the other it is noise."""
    eps: float = 1e-5
    tied: bool = True
    """The head is the embedding once more; else `lm_head.weight`."""

    @property
    def head(self) -> int:
        """Numbers of one head."""
        return self.width // self.heads


class _Kept(NamedTuple):
    """Where a pass finds what was before it, and leaves what it adds."""

    state: KeyValueState
    where: Places
    mask: Tensor
    """bool `[rows, 1, groups · new, longest]`."""


class _Step(NamedTuple):
    """What all layers of one pass share."""

    turn: tuple[Tensor, Tensor]
    """Cosine and sine of each new token's position, `[rows, 1, new, head / 2]`."""
    kept: _Kept | None
    """None: nothing was before, and nothing is kept."""


class RMSNorm(nn.Module):
    """Scale to a root mean square of 1, in float32 whatever comes in."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and datatype."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal, with fewer key heads than query heads."""

    def __init__(self, shape: LlamaShape, number: int) -> None:
        super().__init__()
        self.shape, self.number = shape, number
        narrow = shape.key_heads * shape.head
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, narrow, bias=False)
        self.v_proj = nn.Linear(shape.width, narrow, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, step: _Step) -> Tensor:
        """`[rows, new, width]` → the same."""
        rows, new, width = x.shape
        heads, key_heads, size = self.shape.heads, self.shape.key_heads, self.shape.head
        queries = self._turned(self.q_proj(x).view(rows, new, heads, size).transpose(1, 2), step.turn)
        keys = self._turned(self.k_proj(x).view(rows, new, key_heads, size).transpose(1, 2), step.turn)
        values = self.v_proj(x).view(rows, new, key_heads, size).transpose(1, 2)
        if step.kept is None:
            seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        else:
            keys, values = step.kept.state.write(self.number, step.kept.where, keys, values)
            # The queries of a group look at the same keys: in a row behind each other, so that no key is copied.
            grouped = queries.reshape(rows, key_heads, -1, size).to(keys.dtype)
            seen = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=step.kept.mask)
            seen = seen.reshape(rows, heads, new, size)
        return cast("Tensor", self.o_proj(seen.transpose(1, 2).reshape(rows, new, width).to(x.dtype)))

    def _turned(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Each pair of numbers, turned by the token's angle; in float32."""
        cosine, sine = turn
        wide = x.float().reshape(*x.shape[:-1], *((-1, 2) if self.shape.rope_pairs else (2, -1)))
        axis = -1 if self.shape.rope_pairs else -2
        first, second = wide.unbind(axis)
        both = (first * cosine - second * sine, first * sine + second * cosine)
        return torch.stack(both, axis).flatten(-2).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, new, width]` → the same."""
        return cast("Tensor", self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to what came in."""

    def __init__(self, shape: LlamaShape, number: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.eps)
        self.self_attn = Attention(shape, number)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, step: _Step) -> Tensor:
        """`[rows, new, width]` → the same."""
        x = x + self.self_attn(self.input_layernorm(x), step)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class LlamaBody(nn.Module):
    """Everything below the head."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.eps)

    def forward(self, tokens: Tensor, step: _Step) -> Tensor:
        """`[rows, new]` → `[rows, new, width]`."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, step)
        return cast("Tensor", self.norm(x))


class Llama(GeneratingNetwork):
    """The whole network; `extend` is what the worker runs, `forward` the plain network over whole rows."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.context = shape.context
        self.vocabulary_size = shape.vocabulary
        self.model = LlamaBody(shape)
        self.lm_head = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._blocks = Blocks(shape.layers, shape.key_heads, shape.head)
        self.token_bytes = self._blocks.token_bytes
        half = torch.arange(0, shape.head, 2, dtype=torch.float64) / shape.head
        # In double precision first: at position 8000 float32 angles are off by half a thousandth.
        angles = torch.arange(shape.context, dtype=torch.float64)[:, None] * shape.rope_base**-half
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)
        self.cosine: Tensor
        self.sine: Tensor

    def new_state(self, rows: int, tokens: int) -> KeyValueState:
        """See GeneratingNetwork."""
        return KeyValueState(self._blocks, rows, tokens, self.model.norm.weight.device)

    def extend(self, tokens: Tensor, counts: Tensor, lengths: Tensor, state: State, first_row: int) -> Tensor:
        """See GeneratingNetwork."""
        cache = cast("KeyValueState", state)
        last: Tensor | None = None
        for start in range(0, tokens.shape[1], CHUNK_TOKENS):
            left = (counts - start).clamp(0, CHUNK_TOKENS)
            begun = lengths + counts.clamp(max=start)
            where = places(left, begun, first_row, min(CHUNK_TOKENS, tokens.shape[1] - start))
            hidden = self._chunk(tokens[:, start : start + CHUNK_TOKENS], where, cache)
            ends = hidden[torch.arange(len(hidden), device=hidden.device), (left - 1).clamp(min=0)]
            last = ends if last is None else torch.where((left > 0)[:, None], ends, last)
        if last is None:
            raise ValueError("there are no new tokens")
        return self._logits(last)

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole rows `[rows, length]` → float32 logits `[rows, length, vocabulary]`, each of the token that follows."""
        length = tokens.shape[1]
        turn = (self.cosine[None, None, :length], self.sine[None, None, :length])
        return self._logits(self.model(tokens, _Step(turn, None)))

    def _chunk(self, tokens: Tensor, where: Places, state: KeyValueState) -> Tensor:
        """Hidden numbers `[rows, new, width]`; those of padding mean nothing."""
        positions = where.positions.clamp(max=self.context - 1)  # padding may stand behind the end
        turn = (self.cosine[positions][:, None], self.sine[positions][:, None])
        mask = where.mask.repeat(1, 1, self.shape.heads // self.shape.key_heads, 1)
        return cast("Tensor", self.model(tokens, _Step(turn, _Kept(state, where, mask))))

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return functional.linear(hidden, head).float()


def smollm2_135m() -> Llama:
    """SmolLM2-135M-Instruct: 134.5 M parameters, weights from a GGUF file."""
    return Llama(
        LlamaShape(
            layers=30,
            width=576,
            heads=9,
            key_heads=3,
            inner=1536,
            vocabulary=49152,
            context=8192,
            rope_base=100000.0,
            rope_pairs=True,
        )
    )
