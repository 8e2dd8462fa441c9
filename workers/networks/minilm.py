"""MiniLM-L6, a small BERT, for the worker: an own definition whose parameter names are those of the published weights.

Input: token ids `[rows, tokens]`, int64, and which of them count, int64 or bool of the same shape. Output: the last
hidden states `[rows, tokens, 384]`; pooling them into one vector is the pipeline's matter.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 30522
POSITIONS = 512
WIDTH = 384
INNER = 1536
LAYERS = 6
HEADS = 12
EPS = 1e-12
_RULED_OUT = -1e4
"""Added to the scores of what doesn't count: nothing is left of it after softmax, and FP16 can hold it."""


class Embeddings(nn.Module):
    """Token + place + kind of sentence, of which there is one here."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[rows, tokens]` → `[rows, tokens, width]`."""
        places = self.position_embeddings.weight[: tokens.shape[1]]
        return cast(
            "Tensor", self.LayerNorm(self.word_embeddings(tokens) + places + self.token_type_embeddings.weight[0])
        )


def _added(width: int) -> nn.ModuleDict:
    """A projection and the norm of its sum with what came in."""
    return nn.ModuleDict({"dense": nn.Linear(width, WIDTH), "LayerNorm": nn.LayerNorm(WIDTH, EPS)})


class Layer(nn.Module):
    """Attention, then two linear layers, each added to its input and normalised."""

    def __init__(self) -> None:
        super().__init__()
        own = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": own, "output": _added(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, INNER)})
        self.output = _added(INNER)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """`[rows, tokens, width]` → the same; `bias` `[rows, 1, 1, tokens]` is added to the attention's scores."""
        own = cast("nn.ModuleDict", self.attention["self"])
        query, key, value = (self._split(own[name](x)) for name in ("query", "key", "value"))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
        mixed = mixed.transpose(1, 2).flatten(2)
        x = self._add(cast("nn.ModuleDict", self.attention["output"]), mixed, x)
        return self._add(self.output, functional.gelu(self.intermediate["dense"](x)), x)

    @staticmethod
    def _split(x: Tensor) -> Tensor:
        """`[rows, tokens, width]` → `[rows, heads, tokens, width / heads]`."""
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)

    @staticmethod
    def _add(modules: nn.ModuleDict, inner: Tensor, x: Tensor) -> Tensor:
        return cast("Tensor", modules["LayerNorm"](modules["dense"](inner) + x))


class MiniLM(nn.Module):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Token ids and mask `[rows, tokens]` → hidden states `[rows, tokens, 384]`."""
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, _RULED_OUT)[:, None, None]
        x = self.embeddings(tokens)
        for layer in cast("nn.ModuleList", self.encoder["layer"]):
            x = layer(x, bias)
        return cast("Tensor", x)


def minilm_l6() -> MiniLM:
    """22.6 M parameters; texts of up to 512 tokens, trained with 128."""
    return MiniLM()
