"""Text embedding: one text in, one vector out, so that like texts have like vectors.

The network gives a state per token; on the device these are pooled into one vector in float32 and brought to length 1.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from shared.results import Embedding, Result
from shared.tensors import Array, TensorSpec
from shared.text_pipeline import TextConfig, TextOptions, TextPipeline, mask_of

if TYPE_CHECKING:
    import torch

SHORTEST = 1e-12
"""A vector is taken to have at least this length, so that one of zeros stays one."""


class TextEmbeddingConfig(TextConfig, frozen=True):
    """The `preprocessing:` block of an embedding model's model.yaml."""

    pooling: Literal["mean", "cls", "none"] = "mean"
    """`mean`: of the states of all tokens of the text. `cls`: the first token's state. `none`: the network gives one
    vector a text itself."""
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=65_536)] | None = None
    """Numbers of a vector; if given, checked."""
    normalize: bool = True
    """Whether vectors have length 1 unless a request says otherwise (options.normalize)."""


class TextEmbeddingOptions(TextOptions, frozen=True):
    """What a request may say."""

    normalize: bool | None = None
    """Whether the vector is brought to length 1; by default as preprocessing.normalize says."""


class TextEmbedding(TextPipeline[TextEmbeddingOptions]):
    """Tokens → network → pooling over the mask, length 1 | the vector."""

    options_type = TextEmbeddingOptions
    config_type = TextEmbeddingConfig
    postprocess_is_trivial = True
    config: TextEmbeddingConfig

    def outputs(self) -> tuple[TensorSpec, ...]:
        """`embedding` FP32 [dimensions], of length 1, and `norm` FP32 [1], the length that it had before."""
        dimensions = self.config.dimensions or -1
        return (
            TensorSpec(name="embedding", datatype="FP32", shape=(dimensions,)),
            TensorSpec(name="norm", datatype="FP32", shape=(1,)),
        )

    def reduce(
        self, outputs: "tuple[torch.Tensor, ...]", inputs: "dict[str, torch.Tensor]"
    ) -> "tuple[torch.Tensor, ...]":
        """States [n, length, dimensions], or vectors [n, dimensions] → float32 vectors of length 1, and their norms."""
        states = outputs[0].float()
        wanted = 2 if self.config.pooling == "none" else 3
        if states.ndim != wanted:
            raise ValueError(
                f"the network gives {list(states.shape)}; preprocessing.pooling {self.config.pooling} needs {wanted} "
                "dimensions"
            )
        if self.config.pooling == "cls":
            states = states[:, 0]
        elif self.config.pooling == "mean":
            mask = mask_of(inputs["tokens"])[:, :, None].float()
            states = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        norms = states.norm(dim=1, keepdim=True)
        return states / norms.clamp(min=SHORTEST), norms

    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: TextEmbeddingOptions) -> list[Result]:
        """One Embedding per row."""
        vectors, norms = outputs
        asked = self.config.normalize if options.normalize is None else options.normalize
        values = vectors if asked else np.multiply(vectors, norms)
        return [Embedding(row, context["tokens"], context["truncated"]) for row in values.tolist()]
