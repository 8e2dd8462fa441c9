"""Token classification: one text in, the entities in it out, each with its place in characters.

The labels file has one line for each class of a token: `O` for none, else a kind of entity behind a prefix that says
which part of an entity the token is. `B-` begins one and `I-` goes on (BIO); `L-` or `E-` ends one and `U-` or `S-` is
a whole one (BILOU, BIOES); without any prefix, neighbours of one kind are one entity.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from shared.pipeline import Config
from shared.pipelines._labels import class_scores, count_classes
from shared.results import Entities, Entity, Label, Result
from shared.tensors import Array, TensorSpec
from shared.text_pipeline import TextConfig, TextOptions, TextPipeline
from shared.text_tokens import Tokens

if TYPE_CHECKING:
    import torch

OUTSIDE = "O"
_BEGINS, _ENDS, _WHOLE = frozenset("BUS"), frozenset("LEUS"), frozenset("BILEUS")


class TokenClassificationConfig(TextConfig, frozen=True):
    """The `preprocessing:` block of model.yaml."""

    classes: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Number of classes; needed only when the model has no labels file, and then entities have no kind."""
    words: Literal["first", "each"] = "first"
    """`first`: a word of several tokens has the class of its first one, as most models are trained. `each`: each token
    has its own."""


class TokenClassificationOptions(TextOptions, frozen=True):
    """What a request may say."""

    score_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Entities with a lower score are left out."""


class Part(NamedTuple):
    """One token, or one word, of a text that is part of an entity or stands outside."""

    prefix: str
    """One of BILEUS, or empty."""
    kind: str
    """Of entity; `O` outside."""
    score: float
    start: int
    end: int


class TokenClassification(TextPipeline[TokenClassificationOptions]):
    """Tokens → network → softmax, the best class of each token | tokens put together as entities."""

    options_type = TokenClassificationOptions
    config_type = TokenClassificationConfig
    config: TokenClassificationConfig

    def __init__(self, config: Config, folder: Path, labels: tuple[str, ...]) -> None:
        """Raises StartupError(MODEL_LOAD) when the number of classes is unknown or contradictory, too."""
        super().__init__(config, folder, labels)
        self.classes = count_classes(self.config.classes, labels)
        self._first = {split(name)[1]: index for index, name in reversed(list(enumerate(labels)))}
        """Kind → the first class of it."""

    def outputs(self) -> tuple[TensorSpec, ...]:
        """`token_scores` FP32 [length] and `token_classes` INT32 [length]."""
        return (
            TensorSpec(name="token_scores", datatype="FP32", shape=(-1,)),
            TensorSpec(name="token_classes", datatype="INT32", shape=(-1,), maximum=self.classes),
        )

    def context(self, tokens: Tokens) -> dict[str, Any]:
        """Where the tokens are, and the text that they are of."""
        last = max((end for _, end in tokens.spans), default=0)
        return {
            "spans": tokens.spans,
            "words": tokens.words,
            "text": tokens.text[:last],
            "truncated": tokens.truncated,
        }

    def head(self, outputs: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
        """Logits [n, length, classes] → the best class of each token with its probability, [n, length] each."""
        best = class_scores(outputs, self.classes, dimensions=3).softmax(2).max(2)
        return best.values, best.indices.int()

    def postprocess(
        self, outputs: list[Array], context: dict[str, Any], options: TokenClassificationOptions
    ) -> list[Result]:
        """One Entities per row."""
        return [
            Entities(self._entities(scores, classes, context, options.score_threshold), context["truncated"])
            for scores, classes in zip(outputs[0].tolist(), outputs[1].tolist(), strict=True)
        ]

    def _entities(
        self, scores: list[float], classes: list[int], context: dict[str, Any], threshold: float
    ) -> list[Entity]:
        text = context["text"]
        found = []
        for parts in together(self._parts(scores, classes, context)):
            score = sum(part.score for part in parts) / len(parts)
            start, end = parts[0].start, parts[-1].end
            while start < end and text[start].isspace():  # some tokens take the space before them
                start += 1
            if score >= threshold and start < end:
                label = Label(self._first.get(parts[0].kind, 0), parts[0].kind, score)
                found.append(Entity(label, start, end, text[start:end]))
        return found

    def _parts(self, scores: list[float], classes: list[int], context: dict[str, Any]) -> Iterator[Part]:
        """The text's tokens, or its words, in order; what was filled up behind them is left out."""
        word, part = None, None
        for (start, end), number, score, index in zip(
            context["spans"], context["words"], scores, classes, strict=False
        ):
            if number is None:  # one of the model's special tokens
                continue
            if part is not None and self.config.words == "first" and number == word:
                part = part._replace(end=end)
                continue
            if part is not None:
                yield part
            prefix, kind = split(self.labels[index]) if index < len(self.labels) else ("", str(index))
            word, part = number, Part(prefix, kind, score, start, end)
        if part is not None:
            yield part


def split(label: str) -> tuple[str, str]:
    """A label as prefix and kind: `B-PER` → B, PER; `PER` → nothing, PER."""
    if len(label) > 2 and label[0] in _WHOLE and label[1] in "-_":
        return label[0], label[2:]
    return "", label


def together(parts: Iterator[Part] | Sequence[Part]) -> Iterator[list[Part]]:
    """Neighbours that are one entity. Lenient: what goes on without having begun begins here."""
    entity: list[Part] = []
    for part in parts:
        if entity and (part.kind != entity[-1].kind or part.prefix in _BEGINS or entity[-1].prefix in _ENDS):
            yield entity
            entity = []
        if part.kind != OUTSIDE:
            entity.append(part)
    if entity:
        yield entity
