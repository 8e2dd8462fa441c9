"""The base class of all pipelines: what a model's inputs and outputs mean.

A pipeline is one file with one class. Built-in ones live in `shared/pipelines/<name>.py` and are named by the file;
a user's own is named `module:Class` in `model.yaml`, where `module` is a file in the model's folder or importable.
"""

import abc
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from shared.errors import InvalidOption
from shared.lengths import Shapes, fitting
from shared.options import finite
from shared.results import Result
from shared.tensors import Array, RawTensor, TensorSpec

if TYPE_CHECKING:
    import torch

Kind = Literal["image", "text", "tensors", "file", "chat"]
"""Which field of a request's input a pipeline takes. The data of `chat` is JSON: `[[role, content], …]`."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a pipeline's request options: typed fields with defaults and both bounds (`msgspec.Meta(ge=, le=)`)."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a pipeline's own settings: the `preprocessing:` block of `model.yaml`."""


class RawInput(msgspec.Struct, frozen=True):
    """One input as the caller sent it."""

    kind: Kind
    data: bytes | memoryview = b""
    """Encoded image or file, or UTF-8 text; may be a view of arena memory, valid until `preprocess` returns."""
    tensors: tuple[RawTensor, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the model that this input is: 1, or the first dimension of its tensors."""
        return self.tensors[0].shape[0] if self.tensors else 1

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return sum(len(tensor.data) for tensor in self.tensors) if self.tensors else len(self.data)


class PipelineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a pipeline declares; checked at every border."""

    kind: Kind
    also: tuple[Kind, ...] = ()
    """Other kinds that `preprocess` takes as well."""
    inputs: tuple[TensorSpec, ...]
    """What `preprocess` makes: the tensors that enter the worker."""
    outputs: tuple[TensorSpec, ...]
    """What leaves the worker, after `head`."""

    def takes(self, kind: Kind) -> bool:
        """Whether an input of this kind can be given."""
        return kind == self.kind or kind in self.also


class Prepared(msgspec.Struct):
    """What `preprocess` returns."""

    tensors: list[Array]
    """One per input spec, first dimension rows. An array that is one of the given `out` buffers costs no copy."""
    context: dict[str, Any] = {}
    """Small facts for `postprocess` (original size, …); must be MessagePack-able."""


O = TypeVar("O", bound=Options)  # noqa: E741 - short on purpose, it shows in every signature of a pipeline


class Pipeline(abc.ABC, Generic[O]):
    """Base class. Hooks in call order, with the process that calls them:

    1. `__init__(config, folder, labels)`  every process, once per model version; no torch, no heavy work
    2. `spec`           every process; frozen facts
    3. `options_type`   gateway: parses and bounds the request's options
    4. `preprocess`     pool process, one item at a time
    5. `normalise`      worker, whole batch, on the device (default: tensors as they are)
    6. `head`           worker, whole batch, on the device, float32 (default: outputs as they are); `reduce` in its
                        place sees the inputs, too
    7. `postprocess`    pool process, or the gateway itself when `postprocess_is_trivial`
    8. `example`        any process: a valid input for warm-up, probes and contract tests

    Where a dimension is free, `bucket` and `warm_shapes` say which items share a batch.
    Import torch only inside `normalise` and `head`: the gateway and the pool load this file without it.
    """

    options_type: ClassVar[type[Options]] = Options
    config_type: ClassVar[type[Config]] = Config
    passthrough: ClassVar[bool] = False
    """True when tensors go in and come out as they are: no pool process is asked, the gateway only moves bytes.
    Such a pipeline implements `arrange`."""
    generates: ClassVar[bool] = False
    """True when the worker runs its network token by token (`shared.generation`): such a pipeline has no batches."""
    version_folder: Path = Path()
    """The folder of the version's files; set before `__init__`, for `find_file`."""
    postprocess_is_trivial: ClassVar[bool] = False
    """True when `postprocess` takes microseconds (no NMS, no decoding): the gateway then runs it inline."""

    def __init__(self, config: Config, folder: Path, labels: tuple[str, ...]) -> None:
        """`folder` is the model's folder; `labels` the lines of the labels file, or empty."""
        self.config = config
        self.folder = folder
        self.labels = labels

    @property
    @abc.abstractmethod
    def spec(self) -> PipelineSpec:
        """The frozen facts about inputs and outputs."""

    def open(self) -> None:
        """In a pool process, before the first `preprocess`: load what is too heavy for `__init__`, such as a tokeniser.

        A job has little time, and the first one must not pay for it. Raises HeadraceError or StartupError.
        """

    @abc.abstractmethod
    def preprocess(self, item: RawInput, options: O, out: list[Array]) -> Prepared:
        """Turn one raw input into input tensors.

        `out` holds one writable array of shape [1, *spec.shape] per input spec without free dimensions (arena memory
        where the tensor is large): write into it and return it. Raises InvalidInput when the input can't be used.
        """

    def arrange(self, raw: RawInput) -> tuple[RawTensor, ...]:
        """Only for `passthrough`, in the gateway: the input's tensors, checked, in the order of `spec.inputs`.

        Raises InvalidInput naming the tensor. No copy is made.
        """
        return raw.tensors

    def warm_shapes(self) -> Sequence[Shapes]:
        """For free dimensions: the shapes that batches are padded up to, rising; one per row and input in each of them.

        The worker runs all of them before the version is ready, so that no caller pays for a first time, and measures
        them, so that the gateway knows what a batch of them costs. An item above the last one is run as it is. Empty
        (the default): nothing is known of the sizes, and items are not padded.
        """
        return ()

    def bucket(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """What an item's batch-mates must have in common; `shapes` are those of its prepared tensors.

        Default: the sizes of all free dimensions, rounded up to the first of `warm_shapes` that holds them.
        """
        rows = [shape[1:] for shape in shapes]
        padded = fitting(self.warm_shapes(), rows) or rows
        return tuple(
            size
            for spec, shape in zip(self.spec.inputs, padded, strict=True)
            for want, size in zip(spec.shape, shape, strict=True)
            if want < 0
        )

    def normalise(self, inputs: "dict[str, torch.Tensor]") -> "tuple[torch.Tensor, ...]":
        """Batch of input tensors on the device → the network's positional arguments, in the worker."""
        return tuple(inputs.values())

    def argument_names(self) -> Sequence[frozenset[str]]:
        """For each of `normalise`'s tensors the names that files of networks use for it; empty: they go by position."""
        return ()

    def head(self, outputs: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
        """The network's outputs → one tensor per output spec, on the device, float32 where it matters."""
        return outputs

    def reduce(
        self, outputs: "tuple[torch.Tensor, ...]", inputs: "dict[str, torch.Tensor]"
    ) -> "tuple[torch.Tensor, ...]":
        """As `head`, which it calls, for pipelines that have to look at the input tensors again (what is padding?)."""
        del inputs
        return self.head(outputs)

    @abc.abstractmethod
    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: O) -> list[Result]:
        """Output arrays of one item (first dimension rows) → one result per row."""

    @abc.abstractmethod
    def example(self) -> RawInput:
        """A small valid input."""

    def find_file(self, name: str) -> Path:
        """A file of the model: in the version's folder, else in the model's folder; it may not exist."""
        own = self.version_folder / name
        return own if own.is_file() else self.folder / name

    def files(self) -> tuple[str, ...]:
        """The files that `preprocess` reads, by the names given to `find_file`: where they differ, its tensors do."""
        return ()

    def parse_options(self, given: dict[str, Any]) -> O:
        """The request's options as this pipeline's struct, finite. Raises InvalidOption naming the field."""
        try:
            return finite(msgspec.convert(given, self.options_type))  # type: ignore[return-value]  # options_type is O's class
        except msgspec.ValidationError as error:
            raise InvalidOption(_option_sentence(str(error), given, self.options_type)) from None


def _option_sentence(text: str, given: dict[str, Any], options_type: type[Options]) -> str:
    """Msgspec's message as one sentence that names the option, its value and what is allowed."""
    known = ", ".join(field.name for field in msgspec.structs.fields(options_type)) or "none"
    unknown = re.search(r"unknown field `(.+?)`", text)
    if unknown:
        return f"options.{unknown[1][:100]} is not an option of this model (its options: {known})"
    where = re.search(r"`\$\.(.+?)`", text)
    name = where[1] if where else "options"
    reason = text.split(" - at ", maxsplit=1)[0].replace("`", "")
    return f"options.{name} is {str(given.get(name))[:100]}: {reason[0].lower()}{reason[1:]}"
