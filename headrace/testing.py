"""For the tests of your own models: an answer by the same code that the server runs, without a server.

    from headrace.testing import answer

    def test_it_answers() -> None:
        (result,) = answer(Path(__file__).parent)

The model's current version is verified, loaded and warmed up as a worker does it, on the CPU.
"""

from pathlib import Path
from typing import Any

import numpy as np

from shared.pipeline import Pipeline, RawInput
from shared.pipeline_loader import load_pipeline
from shared.repository import Repository
from shared.results import Result
from shared.settings import Settings
from shared.tensors import DTYPES, Array, TensorSpec


def answer(folder: Path, item: RawInput | None = None, options: dict[str, Any] | None = None) -> list[Result]:
    """What the model in `folder` answers to an item, by default its pipeline's example: one result per row.

    Raises StartupError when it can't be loaded, and what its hooks raise, InvalidInput above all; ValueError for
    numbers that are not finite.
    """
    from workers.backends.torch_device import find  # noqa: PLC0415 - imports torch
    from workers.loading import Loader  # noqa: PLC0415
    from workers.model_pool import Key  # noqa: PLC0415

    folder = folder.resolve()
    version = Repository(folder.parent).open(folder.name)
    settings = Settings(repository=folder.parent)
    pipeline: Pipeline[Any] = load_pipeline(version, torch_allowed=False)  # as gateway and pool load it
    loaded = Loader(settings, find("cpu", 0, 1)).load(Key(version.name, version.version, version.revision))
    asked = pipeline.parse_options(options or {})
    prepared = pipeline.preprocess(item or pipeline.example(), asked, _buffers(pipeline.spec.inputs))
    forward = loaded.runner.run([prepared.tensors], len(prepared.tensors[0]), loaded.runner.precision)
    if not forward.finite.all():
        raise ValueError(f"model {folder.name} gives numbers that are not finite")
    return pipeline.postprocess([array.copy() for array in forward.outputs], prepared.context, asked)


def _buffers(specs: tuple[TensorSpec, ...]) -> list[Array]:
    """As in a pool process: one per input whose size is known before."""
    return [
        np.zeros((1, *spec.shape), DTYPES[spec.datatype]) for spec in specs if all(size >= 0 for size in spec.shape)
    ]
