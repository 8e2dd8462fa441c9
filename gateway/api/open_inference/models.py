"""How a served model looks through the protocol: names, datatypes and shapes of what it takes and gives."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from gateway.api.open_inference import detections, text_results
from gateway.api.parse import shown
from gateway.state import ModelState, comes_by_request
from shared.errors import InvalidInput, UnknownModel, UnknownVersion
from shared.pipeline import Options, Pipeline, PipelineSpec
from shared.tensors import TensorSpec


class Limits(Protocol):
    """`gateway.batcher.BatchLimits`, as far as it is shown."""

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch."""

    @property
    def max_wait_s(self) -> float:
        """How long a row may wait for company."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Allowed batch sizes."""


class Served(Protocol):
    """`gateway.served.ServedModel`, which the edge must not import: the batcher stands behind it."""

    state: ModelState
    spec: PipelineSpec
    pipeline: Pipeline[Options]

    @property
    def limits(self) -> Limits:
        """How it is batched."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def version(self) -> str:
        """The version's content hash."""


class Models(Protocol):
    """`gateway.routing.Routing`."""

    def models(self) -> Iterable[Served]:
        """All served models."""


class ModelView(NamedTuple):
    """Names, datatypes and per-row shapes (-1 is free) at the protocol's side of the pipeline."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


SCORES, CLASSES, LABELS = "scores", "classes", "labels"

_CLASSIFICATION = (
    TensorSpec(name=SCORES, datatype="FP32", shape=(-1,)),
    TensorSpec(name=CLASSES, datatype="INT32", shape=(-1,)),
    TensorSpec(name=LABELS, datatype="BYTES", shape=(-1,)),
)
"""Best first; how many a request says with its `top_k` parameter. Where a threshold leaves fewer classes for one row
than for another, the places behind them have score 0, class -1 and no label."""


TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
"""As other servers of this protocol call them where text is generated."""

_TEXTS = ModelView(
    (TensorSpec(name=TEXT_INPUT, datatype="BYTES", shape=(1,)),),
    (TensorSpec(name=TEXT_OUTPUT, datatype="BYTES", shape=(1,)),),
)


def view_of(model: Served) -> ModelView:
    """What to declare. An encoded image or text is one BYTES element a row."""
    spec = model.spec
    if model.pipeline.generates:
        return _TEXTS
    if spec.kind == "tensors":
        return ModelView(spec.inputs, spec.outputs)
    inputs = (TensorSpec(name=spec.kind, datatype="BYTES", shape=(1,)),)
    if detections.finds_boxes(spec):
        return ModelView(inputs, detections.OUTPUTS)
    if text_results.embeds(spec):
        return ModelView(inputs, text_results.vector_outputs(spec))
    if text_results.finds_entities(spec):
        return ModelView(inputs, text_results.ENTITY_OUTPUTS)
    return ModelView(inputs, _CLASSIFICATION if classifies(spec) else spec.outputs)


def classifies(spec: PipelineSpec) -> bool:
    """Whether a model's answers are classes of an image or a text."""
    return spec.kind != "tensors" and {output.name for output in spec.outputs} == {SCORES, CLASSES}


def find(models: Models, name: str, version: str) -> Served:
    """The served model of that name, ready or not; `version` is a content hash, its `number_of`, or empty.

    Raises UnknownModel, UnknownVersion, or InvalidInput for what can't be a version.
    """
    named = versions_of(models, name)
    if not named:
        raise UnknownModel(f"model {shown(name)} is not served" if name else "the request names no model")
    if not version:
        return named[0]
    for model in named:
        if version in {model.version, number_of(model.version)}:
            return model
    if not _is_version(version):
        raise InvalidInput(
            f"version is {shown(version)}: a version of model {shown(name)} is 16 lower-case hexadecimal digits "
            "or a number"
        )
    raise UnknownVersion(f"version {shown(version)} of model {shown(name)} is not served")


_ANSWERS_NOBODY = {"coming", "retiring", "shadow"}


def versions_of(models: Models, name: str) -> list[Served]:
    """The versions of a model that can be asked for: the current one first."""
    found = [
        model
        for model in models.models()
        if model.name == name and model.state.phase != "unloaded" and model.state.role not in _ANSWERS_NOBODY
    ]
    return sorted(found, key=lambda model: model.state.role != "current")


def can_answer(model: Served) -> bool:
    """Whether a request would be answered: at once, or after it has had the model loaded."""
    return model.state.phase == "ready" or comes_by_request(model.state)


def number_of(version: str) -> str:
    """A content hash as a decimal number, for clients that read versions as 64-bit integers: its first 60 bits."""
    return str(int(version[:15], 16))


def _is_version(text: str) -> bool:
    """A version that might exist somewhere: a hash of ours, or a number as other servers have them."""
    is_hash = len(text) == 16 and all(character in "0123456789abcdef" for character in text)
    return is_hash or (len(text) <= 19 and all(character in "0123456789" for character in text))
