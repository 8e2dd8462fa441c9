"""A version loaded as a worker loads it, and asked as gateway, pool and worker do together: several items a batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.pipeline import RawInput
from shared.pipeline_loader import load_pipeline
from shared.repository import ModelVersion
from shared.results import Result
from shared.settings import BatchingSettings, Settings
from shared.tensors import DTYPES
from workers.backends.torch_device import find
from workers.loading import Loader
from workers.model_pool import Key

ROWS = 4
"""Of the largest batch that is warmed: the rest of the sizes are other tests' business."""


class Served:
    """One loaded version."""

    def __init__(self, version: ModelVersion) -> None:
        settings = Settings(repository=version.folder.parent, batching=BatchingSettings(max_rows=ROWS, sizes=(1, ROWS)))
        self.pipeline = load_pipeline(version, torch_allowed=False)  # as gateway and pool load it
        device = find("cpu", 0, 1)
        self.loaded = Loader(settings, device).load(Key(version.name, version.version, version.revision))

    def together(self, items: Sequence[RawInput], **options: Any) -> list[Result]:  # noqa: ANN401 - any option
        """One result per item, all in one batch."""
        asked = self.pipeline.parse_options(options)
        made = [self.pipeline.preprocess(item, asked, self._buffers()) for item in items]
        runner = self.loaded.runner
        forward = runner.run([each.tensors for each in made], len(items), runner.precision)
        assert forward.finite.all()
        outputs = [array.copy() for array in forward.outputs]
        return [
            result
            for row, each in enumerate(made)
            for result in self.pipeline.postprocess([array[row : row + 1] for array in outputs], each.context, asked)
        ]

    def alone(self, items: Sequence[RawInput], **options: Any) -> list[Result]:  # noqa: ANN401 - any option
        """One result per item, each in a batch of its own."""
        return [result for item in items for result in self.together([item], **options)]

    def _buffers(self) -> list[Any]:
        """As in a pool process: one per input whose size is known before."""
        specs = self.pipeline.spec.inputs
        return [np.zeros((1, *each.shape), DTYPES[each.datatype]) for each in specs if all(n >= 0 for n in each.shape)]
