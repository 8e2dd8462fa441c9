"""A device that only takes time: sleeps `a_ms + b_ms · rows` and answers numbers that depend on the input's bytes.

For capacity tests of gateway and pool without a GPU, and for tests of the server itself. The same input gives the same
output in every process and batch; different inputs give different ones. Imports no torch.
"""

import math
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from shared.clock import now_s
from shared.pipeline import PipelineSpec
from shared.repository import ModelVersion, Repository
from shared.tensors import DTYPES, Array, TensorSpec
from workers.backends.base import Forward, LoadFailed, Precision, Runner
from workers.staging import Inputs

WEIGHTS_FILE = "simulated.json"
FREE_DIMENSION = 1
"""Size of an output dimension that the pipeline leaves free."""

Numbers = npt.NDArray[np.uint64]
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version's only file."""

    a_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)]
    """Milliseconds of any batch."""
    b_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)]
    """Milliseconds more per row."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)] = 0
    """What it is said to take of the device's memory; it really takes none."""


class SimulatedRunner(Runner):
    """See the module's docstring."""

    precision: Precision = "fp32"
    pads = False

    def __init__(self, spec: PipelineSpec, timing: Timing) -> None:
        self.memory_bytes = timing.memory_bytes
        self._outputs = spec.outputs
        self._timing = timing

    def run(self, items: Inputs, padded_rows: int, precision: Precision) -> Forward:  # noqa: ARG002 - the port's signature
        """Reads the rows where they lie (no copy), then sleeps the rest of the batch's time."""
        started_s = now_s()
        digests = np.concatenate([row_digests(arrays) for arrays in items])
        copied_s = now_s()
        outputs = [_answer(digests, output) for output in self._outputs]
        duration_s = (self._timing.a_ms + self._timing.b_ms * len(digests)) / 1e3
        time.sleep(max(0.0, started_s + duration_s - now_s()))
        return Forward(outputs, np.ones(len(digests), np.bool_), copied_s - started_s, now_s() - copied_s)


def load(version: ModelVersion, spec: PipelineSpec) -> SimulatedRunner:
    """Read the timing. Raises LoadFailed or RepositoryError with one sentence."""
    Repository.verify(version)
    return SimulatedRunner(spec, _timing(version))


def expected_bytes(version: ModelVersion) -> int:
    """What the version will say that it takes. Raises LoadFailed."""
    return _timing(version).memory_bytes


def _timing(version: ModelVersion) -> Timing:
    try:
        return msgspec.json.decode((version.files / WEIGHTS_FILE).read_bytes(), type=Timing)
    except FileNotFoundError:
        raise LoadFailed(f"model {version.name}: version {version.version} has no {WEIGHTS_FILE}") from None
    except msgspec.DecodeError as error:
        raise LoadFailed(f"model {version.name}: {WEIGHTS_FILE}: {error}") from None


def row_digests(arrays: Sequence[Array]) -> Numbers:
    """64 bits per row over all its input bytes: a sum of words weighted by odd numbers, cheap enough for images."""
    total = [0] * len(arrays[0])
    for number, array in enumerate(arrays):
        flat = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
        whole = flat.shape[1] // 8 * 8
        weights = _weights(flat.shape[1] // 8 + 8, number)
        for row, bits in enumerate(flat):
            words = bits[:whole].view(np.uint64) if bits.ctypes.data % 8 == 0 else bits[:whole].copy().view(np.uint64)
            rest = bits[whole:] * weights[len(words) : len(words) + flat.shape[1] - whole]
            total[row] += int((words * weights[: len(words)]).sum()) + int(rest.sum())
    return _mixed(np.array([value % 2**64 for value in total], np.uint64))


@lru_cache(maxsize=64)  # one entry per input and length in use
def _weights(count: int, seed: int) -> Numbers:
    generator = np.random.PCG64(seed)
    return np.asarray(generator.random_raw(count), np.uint64) | np.uint64(1)


def _mixed(value: Numbers) -> Numbers:
    """Spread every bit over all bits (the finaliser of splitmix64)."""
    value = (value ^ (value >> np.uint64(30))) * _MIX[0]
    value = (value ^ (value >> np.uint64(27))) * _MIX[1]
    return value ^ (value >> np.uint64(31))


def _answer(digests: Numbers, output: TensorSpec) -> Array:
    """`[rows, *shape]`: floats in [0, 1] descending along the last dimension, integers below `maximum`."""
    shape = tuple(FREE_DIMENSION if size < 0 else size for size in output.shape)
    dtype = DTYPES[output.datatype]
    places = np.arange(math.prod(shape), dtype=np.uint64)
    if dtype.kind == "f":
        first = 0.5 + (digests >> np.uint64(11)).astype(np.float64) * 2.0**-54
        values = first[:, None] * 0.5 ** (places % np.uint64(shape[-1] if shape else 1)).astype(np.float64)
    else:
        maximum = output.maximum or (2 if dtype.kind == "b" else 2 ** (8 * dtype.itemsize - 1))
        step = np.uint64(max(1, maximum // max(1, len(places))))
        values = (digests[:, None] + places * step) % np.uint64(maximum)
    return values.astype(dtype).reshape(len(digests), *shape)
