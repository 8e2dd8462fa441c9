"""Runs a Python function over numpy arrays: tiny models, tests, and anything that needs no accelerator. No torch.

`network: module:factory` names a function that returns the network: one array `[rows, …]` per input in, one per output
out (an array, or a tuple of them). BYTES arrive and leave as arrays of Python bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shared.clock import now_s
from shared.pipeline import PipelineSpec
from shared.pipeline_loader import load_object
from shared.repository import ModelVersion, Repository
from shared.tensors import DTYPES, Array
from workers.backends.base import Forward, LoadFailed, Mask, NotAsDeclared, Precision, Runner
from workers.staging import Inputs, batch_shape, put_together

Network = Callable[..., Any]


class NumpyRunner(Runner):
    """See the module's docstring."""

    precision: Precision = "fp32"
    memory_bytes = 0
    pads = False

    def __init__(self, network: Network, spec: PipelineSpec) -> None:
        self._network = network
        self._inputs = spec.inputs
        self._outputs = spec.outputs

    def run(self, items: Inputs, padded_rows: int, precision: Precision) -> Forward:  # noqa: ARG002 - the port's signature
        """Rows side by side, one call. Raises NotAsDeclared when the outputs are not what the pipeline declares."""
        started_s = now_s()
        inputs = [
            _together(arrays, spec.fill) for arrays, spec in zip(zip(*items, strict=True), self._inputs, strict=True)
        ]
        copied_s = now_s()
        answer = self._network(*inputs)
        outputs = [np.ascontiguousarray(output) for output in (answer if isinstance(answer, tuple) else (answer,))]
        rows = len(inputs[0])
        self._check(outputs, rows)
        return Forward(outputs, _finite(outputs, rows), copied_s - started_s, now_s() - copied_s)

    def _check(self, outputs: list[Array], rows: int) -> None:
        got = [(output.dtype, output.shape[:1]) for output in outputs]
        declared = [(DTYPES[spec.datatype], (rows,)) for spec in self._outputs]
        if got != declared:
            raise NotAsDeclared(f"the network's outputs are {got}, the pipeline declares {declared}")


def load(version: ModelVersion, spec: PipelineSpec) -> NumpyRunner:
    """Verify the version's files and build the network. Raises LoadFailed or RepositoryError with one sentence."""
    Repository.verify(version)
    if version.config.network is None:
        raise LoadFailed(f"model {version.name}: backend numpy needs network, a `module:factory`")
    network = load_object(version.config.network, version.folder, version.name)()
    if not callable(network):
        raise LoadFailed(f"model {version.name}: {version.config.network} did not return a function")
    return NumpyRunner(network, spec)


def _together(arrays: Sequence[Array], fill: int) -> Array:
    """All rows; smaller items are filled up to the largest."""
    if len(arrays) == 1:
        return arrays[0]
    shape = batch_shape(arrays)
    if all(array.shape[1:] == shape[1:] for array in arrays):
        return np.concatenate(arrays)
    batch = np.empty(shape, arrays[0].dtype)
    put_together(arrays, batch, fill)
    return batch


def _finite(outputs: list[Array], rows: int) -> Mask:
    finite = np.ones(rows, np.bool_)
    for output in outputs:
        if output.dtype.kind == "f":
            finite &= np.isfinite(output).reshape(rows, -1).all(axis=1)
    return finite
