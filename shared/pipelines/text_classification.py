"""Text classification: one text in, the likeliest class or all that apply out.

With one label a text the scores are probabilities that add up to 1 (softmax); with several each class has a probability
of its own (sigmoid). Either way the head gives the best k in float32, so that only k numbers a row travel back.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from shared.pipeline import Config
from shared.pipelines._labels import best_of, best_specs, check_top_k, class_scores, count_classes, named
from shared.results import Classification, Result
from shared.tensors import Array, TensorSpec
from shared.text_pipeline import TextConfig, TextOptions, TextPipeline

if TYPE_CHECKING:
    import torch


class TextClassificationConfig(TextConfig, frozen=True):
    """The `preprocessing:` block of a text classifier's model.yaml."""

    multi_label: bool = False
    """Whether several classes, or none, may apply to a text."""
    max_top_k: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 10
    """Classes that leave the worker per row: the most that a request can ask for."""
    classes: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Number of classes; needed only when the model has no labels file."""


class TextClassificationOptions(TextOptions, frozen=True):
    """What a request may say."""

    top_k: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 5
    """Classes to return, best first; a model with fewer classes returns all of them."""
    score_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Classes with a lower score are left out."""


class TextClassification(TextPipeline[TextClassificationOptions]):
    """Tokens → network → softmax or sigmoid, top-k | labels."""

    options_type = TextClassificationOptions
    config_type = TextClassificationConfig
    postprocess_is_trivial = True
    config: TextClassificationConfig

    def __init__(self, config: Config, folder: Path, labels: tuple[str, ...]) -> None:
        """Raises StartupError(MODEL_LOAD) when the number of classes is unknown or contradictory, too."""
        super().__init__(config, folder, labels)
        self.classes = count_classes(self.config.classes, labels)

    def outputs(self) -> tuple[TensorSpec, ...]:
        """`scores` FP32 [k] and `classes` INT32 [k], best first."""
        return best_specs(self.classes, self.config.max_top_k)

    def parse_options(self, given: dict[str, Any]) -> TextClassificationOptions:
        """Refuses more classes than leave the worker. Raises InvalidOption."""
        options = super().parse_options(given)
        check_top_k(given, options.top_k, self.config.max_top_k)
        return options

    def head(self, outputs: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
        """Logits [n, classes] → float32 probabilities [n, k] and int32 class numbers [n, k], best first."""
        logits = class_scores(outputs, self.classes)
        return best_of(
            logits.sigmoid() if self.config.multi_label else logits.softmax(1), self.spec.outputs[0].shape[0]
        )

    def postprocess(
        self,
        outputs: list[Array],
        context: dict[str, Any],  # noqa: ARG002 - the hook's signature
        options: TextClassificationOptions,
    ) -> list[Result]:
        """One Classification per row: the first `top_k` classes that reach the threshold."""
        scores = outputs[0][:, : options.top_k].tolist()
        classes = outputs[1][:, : options.top_k].tolist()
        return [
            Classification([label for label in named(self.labels, *row) if label.score >= options.score_threshold])
            for row in zip(classes, scores, strict=True)
        ]
