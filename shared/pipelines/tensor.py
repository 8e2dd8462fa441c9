"""Raw tensors in, raw tensors out: serves any network with declared inputs and outputs, without a line of Python.

The gateway checks names, datatypes and shapes and moves the bytes; no pool process is asked.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from shared.errors import ExitCode, InvalidInput, StartupError
from shared.pipeline import Config, Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import Result, Tensors
from shared.tensors import DTYPES, Array, RawTensor, Tensor, TensorSpec, as_array, datatype_of, wire_bytes

MAX_RANK = 8
_FREE_EXAMPLE = 1
"""Size of a free dimension in the example."""


class DeclaredTensor(Config, frozen=True):
    """One input or output of the network, as model.yaml declares it."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._/:-]{0,127}$")]
    datatype: str
    """A name of the Open Inference Protocol, e.g. FP32."""
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=-1)], ...], msgspec.Meta(max_length=MAX_RANK)]
    """Per row, without the row dimension; -1 is free, and rows of different sizes then never share a batch."""


class TensorConfig(Config, frozen=True):
    """The `preprocessing:` block of model.yaml."""

    inputs: Annotated[tuple[DeclaredTensor, ...], msgspec.Meta(min_length=1, max_length=64)]
    outputs: Annotated[tuple[DeclaredTensor, ...], msgspec.Meta(min_length=1, max_length=64)]


class TensorPipeline(Pipeline[Options]):
    """Checks and passes on."""

    config_type = TensorConfig
    passthrough = True
    config: TensorConfig

    def __init__(self, config: Config, folder: Path, labels: tuple[str, ...]) -> None:
        """Raises StartupError(BAD_SETTINGS) for an unknown datatype or a name declared twice."""
        super().__init__(config, folder, labels)
        self._spec = PipelineSpec(
            kind="tensors",
            inputs=_specs(self.config.inputs, "inputs"),
            outputs=_specs(self.config.outputs, "outputs"),
        )

    @property
    def spec(self) -> PipelineSpec:
        """As declared in model.yaml."""
        return self._spec

    def arrange(self, raw: RawInput) -> tuple[RawTensor, ...]:
        """All declared tensors, once each, with one row count. Raises InvalidInput naming the tensor."""
        given = {tensor.name: tensor for tensor in raw.tensors}
        wanted = self._spec.inputs
        if len(given) != len(raw.tensors) or given.keys() != {spec.name for spec in wanted}:
            names = ", ".join(tensor.name[:100] for tensor in raw.tensors[:10])
            expected = ", ".join(spec.name for spec in wanted)
            raise InvalidInput(f"expected {len(wanted)} input(s) ({expected}), got {len(raw.tensors)} ({names})")
        ordered = tuple(given[spec.name] for spec in wanted)
        rows = ordered[0].shape[0] if ordered[0].shape else 0
        for spec, tensor in zip(wanted, ordered, strict=True):
            _check(spec, tensor, rows)
        return ordered

    def preprocess(self, item: RawInput, options: Options, out: list[Array]) -> Prepared:  # noqa: ARG002 - the hook's signature
        """The same in a pool process, where a subclass may do more."""
        return Prepared(tensors=[as_array(Tensor(*tensor), None) for tensor in self.arrange(item)])  # type: ignore[arg-type]  # a view is as good as bytes here

    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: Options) -> list[Result]:  # noqa: ARG002 - the hook's signature
        """One result with all rows."""
        specs = self._spec.outputs
        return [
            Tensors(
                [
                    Tensor(spec.name, datatype_of(array), array.shape, wire_bytes(array))
                    for spec, array in zip(specs, outputs, strict=True)
                ]
            )
        ]

    def example(self) -> RawInput:
        """One row of zeros (BYTES: of empty elements)."""
        return RawInput(kind="tensors", tensors=tuple(_example(spec) for spec in self._spec.inputs))


def _specs(declared: tuple[DeclaredTensor, ...], where: str) -> tuple[TensorSpec, ...]:
    names = [tensor.name for tensor in declared]
    for number, tensor in enumerate(declared):
        if tensor.datatype not in DTYPES:
            raise StartupError(
                ExitCode.BAD_SETTINGS,
                f"preprocessing.{where}[{number}].datatype is {tensor.datatype[:100]!r}; known: {', '.join(DTYPES)}",
            )
    if len(set(names)) < len(names):
        raise StartupError(ExitCode.BAD_SETTINGS, f"preprocessing.{where} declares a name twice: {', '.join(names)}")
    return tuple(TensorSpec(name=t.name, datatype=t.datatype, shape=t.shape) for t in declared)


def _check(spec: TensorSpec, tensor: RawTensor, rows: int) -> None:
    if tensor.datatype != spec.datatype:
        raise InvalidInput(f"input {spec.name} has datatype {tensor.datatype[:100]}, expected {spec.datatype}")
    shape = tensor.shape
    fits = len(shape) == len(spec.shape) + 1 and all(
        want in (-1, have) for want, have in zip(spec.shape, shape[1:], strict=True)
    )
    if not fits:
        raise InvalidInput(f"input {spec.name} has shape {_short(shape)}, expected {[-1, *spec.shape]} (-1 is free)")
    if shape[0] != rows or rows < 1:
        raise InvalidInput(f"input {spec.name} has {shape[0]} rows; all inputs must have the same number, 1 or more")


def _short(shape: tuple[int, ...]) -> str:
    return str(list(shape[:16])) + ("…" if len(shape) > 16 else "")


def _example(spec: TensorSpec) -> RawTensor:
    shape = (1, *(_FREE_EXAMPLE if size < 0 else size for size in spec.shape))
    zeros = np.zeros(shape, DTYPES[spec.datatype])
    if spec.datatype == "BYTES":
        zeros.fill(b"")
    return RawTensor(spec.name, spec.datatype, shape, wire_bytes(zeros))
