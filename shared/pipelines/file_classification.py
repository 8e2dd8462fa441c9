"""File classification: the bytes of a file in, what kind of content it is out.

The network sees only the first and the last bytes of a file, so that a large one costs no more than a small one. The
rules of a model (a JSON file beside its weights) say what is too short to be judged by a network, how sure it must be
of which class, and what is answered where it is not: as `magika` does, whose model this is made for.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from shared.errors import ExitCode, StartupError
from shared.pipeline import Config, Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.pipelines._labels import best_of, best_specs, check_top_k, class_scores, named
from shared.results import Classification, Label, Result
from shared.tensors import Array, TensorSpec

if TYPE_CHECKING:
    import torch

Bytes = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class FileClassificationConfig(Config, frozen=True):
    """The `preprocessing:` block of model.yaml."""

    head_bytes: Bytes = 1024
    """Bytes of the file's beginning that the network sees."""
    tail_bytes: Bytes = 1024
    """Bytes of its end."""
    block_bytes: Bytes = 4096
    """White space is stripped within so many bytes of either end, before head and tail are taken."""
    padding: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 256
    """Stands where a file has no byte: behind its head, before its tail."""
    rules: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")] | None = None
    """A JSON file with `Rules`, in the version's folder, else in the model's; without one the best class is told."""
    confidence: Literal["high", "medium", "best_guess"] = "high"
    """How sure the network must be to be believed: `high`, of each class by its own threshold; `medium`, of all by the
    common one; `best_guess`, not at all. Without rules it always is."""
    logits: bool = False
    """Whether the network gives logits instead of probabilities."""
    max_top_k: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 10
    """Classes that leave the worker per row: the most that a request can ask for."""
    classes: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Classes of the network: the first lines of the labels file, which may name more for the rules; default all."""


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When the network is believed, and what is answered when it is not."""

    min_bytes: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    """A file with fewer bytes, white space at its beginning not counted, is only told apart by whether it is UTF-8."""
    threshold: Share = 0.5
    """The least score of a class."""
    thresholds: dict[str, Share] = {}
    """Of classes that are easily mistaken."""
    overwrite: dict[str, str] = {}
    """Classes that are told by another name."""
    text: frozenset[str] = frozenset()
    """Classes whose files are text."""
    text_label: str = "txt"
    """Answered for text that is none of the classes."""
    binary_label: str = "unknown"
    """Answered for anything else that is none of them."""
    empty_label: str = "empty"
    """Answered for a file without bytes."""

    def answers(self) -> set[str]:
        """Labels that the rules may answer with."""
        return {self.text_label, self.binary_label, self.empty_label, *self.overwrite.values()}


class FileClassificationOptions(Options, frozen=True):
    """What a request may say."""

    top_k: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 5
    """Classes to return, best first."""
    score_threshold: Share = 0.0
    """Classes with a lower score are left out."""


class FileClassification(Pipeline[FileClassificationOptions]):
    """Head and tail of the bytes → network → top-k | rules | labels."""

    options_type = FileClassificationOptions
    config_type = FileClassificationConfig
    postprocess_is_trivial = True
    config: FileClassificationConfig

    def __init__(self, config: Config, folder: Path, labels: tuple[str, ...]) -> None:
        """Raises StartupError(MODEL_LOAD) when labels, classes and rules don't belong together."""
        super().__init__(config, folder, labels)
        self.classes = self.config.classes or len(labels)
        if not labels or self.classes > len(labels):
            raise StartupError(
                ExitCode.MODEL_LOAD,
                f"the labels file has {len(labels)} lines; the network has {self.classes or 'unknown'} classes",
            )
        self._rules = self._read_rules(self.config.rules) if self.config.rules else None
        self._numbers = {name: number for number, name in reversed(list(enumerate(labels)))}
        self._check_answers()
        self._spec = _make_spec(self.config, self.classes)

    @property
    def spec(self) -> PipelineSpec:
        """`bytes` INT32 [head_bytes + tail_bytes] → `scores` FP32 [k] and `classes` INT32 [k], best first."""
        return self._spec

    def parse_options(self, given: dict[str, Any]) -> FileClassificationOptions:
        """Refuses more classes than leave the worker. Raises InvalidOption."""
        options = super().parse_options(given)
        check_top_k(given, options.top_k, self.config.max_top_k)
        return options

    def preprocess(self, item: RawInput, options: FileClassificationOptions, out: list[Array]) -> Prepared:  # noqa: ARG002 - the hook's signature
        """Fill `out[0]`, int32 [1, head_bytes + tail_bytes]. Any bytes are a file."""
        config, row = self.config, out[0][0]
        first = bytes(item.data[: config.block_bytes])
        head = first.lstrip()
        tail = bytes(item.data[-config.block_bytes :]).rstrip()[-config.tail_bytes :]
        row.fill(config.padding)
        _put(row, 0, head[: config.head_bytes])
        _put(row, len(row) - len(tail), tail)
        return Prepared(tensors=[out[0]], context={"answer": self._without_network(first, head)})

    def normalise(self, inputs: "dict[str, torch.Tensor]") -> "tuple[torch.Tensor, ...]":
        """int32 [n, head_bytes + tail_bytes], as it is, whatever the network calls it."""
        return (inputs["bytes"],)

    def head(self, outputs: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
        """Scores [n, classes] → float32 probabilities [n, k] and int32 class numbers [n, k], best first."""
        scores = class_scores(outputs, self.classes)
        return best_of(scores.softmax(1) if self.config.logits else scores, self._spec.outputs[0].shape[0])

    def postprocess(
        self, outputs: list[Array], context: dict[str, Any], options: FileClassificationOptions
    ) -> list[Result]:
        """One Classification per row: what the rules say first, then the network's own guesses."""
        answer = context["answer"]
        if answer:
            return [Classification([self._label(answer, 1.0)])]
        rows = zip(outputs[0].tolist(), outputs[1].tolist(), strict=True)
        return [Classification(self._judged(scores, classes, options)) for scores, classes in rows]

    def example(self) -> RawInput:
        """A few lines of a script."""
        return RawInput(kind="file", data=b'#!/bin/sh\nset -e\nfor name in *.txt; do\n  wc -l "$name"\ndone\n')

    def _judged(self, scores: list[float], classes: list[int], options: FileClassificationOptions) -> list[Label]:
        guesses = named(self.labels, classes, scores)
        best = guesses[0]
        told = self._told(best.name, best.score)
        labels = [self._label(told, best.score), *(guess for guess in guesses if guess.name != told)]
        return [label for label in labels[: options.top_k] if label.score >= options.score_threshold]

    def _told(self, name: str, score: float) -> str:
        """The network's best class, or what is said instead where it is not sure enough."""
        rules = self._rules
        if rules is None:
            return name
        told = rules.overwrite.get(name, name)
        needed = {
            "high": rules.thresholds.get(name, rules.threshold),
            "medium": rules.threshold,
            "best_guess": 0.0,
        }[self.config.confidence]
        if score >= needed:
            return told
        return rules.text_label if told in rules.text else rules.binary_label

    def _without_network(self, first: bytes, head: bytes) -> str:
        """What a file is that has too little to be judged; else empty."""
        rules = self._rules
        if rules is None or len(head) >= rules.min_bytes:
            return ""
        if not first:
            return rules.empty_label
        try:
            first.decode()
        except UnicodeDecodeError:
            return rules.binary_label
        return rules.text_label

    def _label(self, name: str, score: float) -> Label:
        return Label(self._numbers[name], name, score)

    def _read_rules(self, name: str) -> Rules:
        try:
            return msgspec.json.decode(self.find_file(name).read_bytes(), type=Rules)
        except FileNotFoundError:
            why = "is neither in the version's nor in the model's folder"
        except (OSError, msgspec.DecodeError) as error:
            why = f"can't be read: {error.strerror if isinstance(error, OSError) else error}"
        raise StartupError(ExitCode.MODEL_LOAD, f"{name} (preprocessing.rules) {why}")

    def _check_answers(self) -> None:
        missing = sorted(self._rules.answers() - self._numbers.keys()) if self._rules else []
        if missing:
            text = f"{self.config.rules} answers with {missing[0][:100]!a}, which is not in the labels file"
            raise StartupError(ExitCode.MODEL_LOAD, text)


def _put(row: Array, at: int, content: bytes) -> None:
    row[at : at + len(content)] = np.frombuffer(content, np.uint8)


def _make_spec(config: FileClassificationConfig, classes: int) -> PipelineSpec:
    length = config.head_bytes + config.tail_bytes
    return PipelineSpec(
        kind="file",
        inputs=(TensorSpec(name="bytes", datatype="INT32", shape=(length,), maximum=max(config.padding + 1, 256)),),
        outputs=best_specs(classes, config.max_top_k),
    )
