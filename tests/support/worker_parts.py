"""Stand-ins for the worker's tests: a runner whose rows decide what happens, a tiny pipeline, repositories on disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.arena import Arena, AttachedArena
from shared.clock import FOREVER_S
from shared.messages import BatchItem, RunBatch
from shared.model_config import revision_of
from shared.pipeline import Config, Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.repository import Meta, ModelVersion
from shared.repository_writer import add_version
from shared.results import Result
from shared.tensors import Array, SlotRef, Tensor, TensorSpec
from workers.backends.base import DeviceLost, Forward, OutOfMemory, Precision, Runner
from workers.loaded import Key, LoadedVersion
from workers.staging import Inputs

WIDTH = 4
TOY = Key("toy", "0" * 16, revision_of(b""))
POISON = 666.0
OVERFLOW = 1e6
"""Not finite in FP16, fine in FP32."""
NEVER_FINITE = 1e9
DEADLY = -1.0

TOY_PIPELINE_SOURCE = """
from shared.pipeline import Pipeline, PipelineSpec, Prepared
from shared.tensors import TensorSpec


class Toy(Pipeline):
    @property
    def spec(self):
        return PipelineSpec(
            kind="tensors",
            inputs=(TensorSpec(name="x", datatype="FP32", shape=(4,)),),
            outputs=(TensorSpec(name="y", datatype="FP32", shape=(4,)),),
        )

    def preprocess(self, item, options, out):
        return Prepared([])

    def postprocess(self, outputs, context, options):
        return []

    def example(self):
        return None
"""
"""The same as `ToyPipeline`, as a user would write it next to model.yaml."""


class ToyPipeline(Pipeline[Options]):
    """FP32 [4] in, FP32 [4] out."""

    def __init__(self) -> None:
        super().__init__(Config(), Path(), ())

    @property
    def spec(self) -> PipelineSpec:
        """See the class."""
        return PipelineSpec(
            kind="tensors",
            inputs=(TensorSpec(name="x", datatype="FP32", shape=(WIDTH,)),),
            outputs=(TensorSpec(name="y", datatype="FP32", shape=(WIDTH,)),),
        )

    def preprocess(self, item: RawInput, options: Options, out: list[Array]) -> Prepared:
        """Not called by a worker."""
        return Prepared([])

    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: Options) -> list[Result]:
        """Not called by a worker."""
        return []

    def example(self) -> RawInput:
        """Not called by a worker."""
        return RawInput(kind="tensors")


class FakeRunner(Runner):
    """Doubles its rows. A first number POISON raises, OVERFLOW and NEVER_FINITE overflow, DEADLY kills the device."""

    def __init__(self, precision: Precision = "fp32", memory_rows: int | None = None) -> None:
        self.precision = precision
        self.memory_bytes = 123
        self.pads = True
        self.memory_rows = memory_rows
        self.passes: list[tuple[list[float], int, Precision]] = []
        """Per pass: the rows' first numbers, padded_rows, precision."""

    def run(self, items: Inputs, padded_rows: int, precision: Precision) -> Forward:
        """See the class."""
        rows = np.concatenate([np.asarray(arrays[0]) for arrays in items])
        first = [float(row[0]) for row in rows]
        self.passes.append((first, padded_rows, precision))
        if DEADLY in first:
            raise DeviceLost("device-side assert")
        if self.memory_rows is not None and len(rows) > self.memory_rows:
            raise OutOfMemory("no memory")
        if POISON in first:
            raise RuntimeError("bad row in here")
        limit = OVERFLOW if precision == "fp16" else NEVER_FINITE
        finite = np.array([number < limit for number in first], np.bool_)
        return Forward([rows * 2], finite, copy_s=0.001, run_s=0.002)


def loaded(runner: Runner, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32), key: Key = TOY) -> LoadedVersion:
    """A ready version around a runner."""
    return LoadedVersion(key, runner, ToyPipeline(), [(size, 0.001) for size in sizes])


def item(number: int, *firsts: float, deadline_s: float = FOREVER_S, slots: Sequence[SlotRef] = ()) -> BatchItem:
    """An inline item with one row per number, which is its first value."""
    rows = np.zeros((len(firsts), WIDTH), "<f4")
    rows[:, 0] = firsts
    tensor = Tensor("x", "FP32", rows.shape, rows.tobytes())
    return BatchItem(number, deadline_s, len(firsts), [tensor], list(slots))


def batch(*items: BatchItem, model: int = 1, padded_rows: int | None = None, number: int = 1) -> RunBatch:
    """A batch, not padded unless told otherwise."""
    return RunBatch(number, model, list(items), padded_rows or sum(item.rows for item in items))


class TwoSidedArena:
    """An arena and the worker's view of it."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.owner = Arena.create(nbytes)
        self.attached = AttachedArena.attach(self.owner.fd, self.owner.nbytes)

    def close(self) -> None:
        """Both sides."""
        self.attached.close()
        self.owner.close()


def toy_model(
    root: Path, name: str, model_yaml: str, files: Mapping[str, bytes], code: str = "", **modules: str
) -> ModelVersion:
    """A model on disk: the toy pipeline's file, the user's code as `mine.py`, and one current version of `files`.

    `modules`: more files of code, by name.
    """
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "toy.py").write_text(TOY_PIPELINE_SOURCE)
    (folder / "mine.py").write_text(code)
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    (folder / "model.yaml").write_text(model_yaml)
    paths = {}
    for relative, content in files.items():
        paths[relative] = root / relative
        paths[relative].write_bytes(content)
    version = add_version(root, name, paths, Meta(source="test"), make_current=True, by="test")
    for path in paths.values():
        path.unlink()
    return version
