"""One loaded PyTorch version on a device that works beside the host. Worker only.

    copies      rows → lane ─ mark ┐                    rows of the next batch → other lane
    computing                      └ network (or its graph) → results → pinned memory ─ mark

The host queues all of that and goes on; it waits once, for the last mark. Two passes may be under way, each in a lane.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared.logs import get_logger
from shared.pipeline import Pipeline
from shared.tensors import Array
from workers.backends.base import DeviceLost, Forward, Pass, Precision
from workers.backends.graphs import Graphs, agree
from workers.backends.lane import Lane
from workers.backends.streams import Mark, Streams
from workers.backends.torch_device import TorchDevice
from workers.backends.torch_runner import Network, TorchRunner
from workers.staging import Inputs, Padding

LANES = 2

_log = get_logger()


class Marks:
    """Of one pass, in the order in which the device comes to them."""

    __slots__ = ("began", "copied", "ended", "started")

    began: Mark
    copied: Mark
    started: Mark
    ended: Mark


class StreamPass(Pass):
    """A pass in its lane."""

    def __init__(self, runner: "StreamRunner", results: list[Tensor], marks: Marks) -> None:
        self._runner = runner
        self._results = results
        self.marks = marks

    def done(self) -> bool:
        """See Pass."""
        with self._runner.judged():
            return self.marks.ended.reached()

    def wait(self) -> Forward:
        """See Pass. The arrays lie in the lane."""
        marks = self.marks
        with self._runner.judged():
            marks.ended.wait()
            *outputs, finite = [result.numpy() for result in self._results]
            copy_s, run_s = marks.copied.after_s(marks.began), marks.ended.after_s(marks.started)
        return Forward(self._runner.in_spec(outputs), finite, copy_s, run_s)


class StreamRunner(TorchRunner):
    """See the module's docstring. `network` is in evaluation mode and on the device, which has been settled."""

    lanes = LANES

    def __init__(
        self,
        network: Network,
        pipeline: Pipeline[Any],
        device: TorchDevice,
        precision: Precision,
        memory_bytes: int = 0,
    ) -> None:
        if device.streams is None:
            raise ValueError(f"{device.name} has no streams")
        self._streams: Streams = device.streams
        padding = Padding(pipeline.spec.inputs, pipeline.warm_shapes())
        self._lanes = [Lane(self._streams, device.is_pinned, padding) for _ in range(LANES)]
        self.graphs = Graphs(self._streams)
        super().__init__(network, pipeline, device, precision, memory_bytes)
        self.pads = True

    def weigh(self) -> None:
        """See Runner. The lanes' buffers, which are for batches, are not in it."""
        super().weigh()
        self.memory_bytes += self.graphs.memory_bytes()

    def run(self, items: Inputs, padded_rows: int, precision: Precision) -> Forward:
        """See Runner. Uses the first lane."""
        return self._begin(items, padded_rows, precision, 0)[0].wait()

    def start(self, items: Inputs, padded_rows: int, precision: Precision, lane: int) -> StreamPass:
        """See Runner."""
        under_way, ended = self._begin(items, padded_rows, precision, lane)
        self._streams.ring_at(ended)
        return under_way

    def _begin(self, items: Inputs, padded_rows: int, precision: Precision, lane: int) -> tuple[StreamPass, Mark]:
        rows = sum(len(arrays[0]) for arrays in items)
        marks = Marks()
        # Judging an error waits for the device: when it leaves here, nothing of this pass is queued any more.
        with self.judged(), torch.inference_mode():
            batch = self._gather(items, padded_rows, lane, marks)
            with self._streams.computing(marks.copied):
                marks.started = self._streams.mark()
                outputs = self.graphs.run(batch) if precision == self.precision else None
                if outputs is None:
                    outputs = self._streams.call(partial(self.forward, precision=precision), batch)
                results = self._lanes[lane].fetch(outputs, rows)
                marks.ended = self._streams.mark()
        return StreamPass(self, results, marks), marks.ended

    def _gather(self, items: Inputs, padded_rows: int, lane: int, marks: Marks) -> list[Tensor]:
        with self._streams.copying():
            marks.began = self._streams.mark()
            batch = self._lanes[lane].gather(items, padded_rows)
            marks.copied = self._streams.mark()
        return batch

    # ---------------------------------------------------------------- graphs

    def prepare(self, rows: Sequence[Array], sizes: Sequence[int]) -> Sequence[int]:
        """Capture a graph per size, the largest first; a size whose capture fails runs eagerly. Raises DeviceLost."""
        failed: dict[str, list[int]] = {}
        planned = []
        for size in sorted(sizes, reverse=True):
            reason = self._capture(rows, size)
            if reason is None:
                planned.append(size)
            else:
                failed.setdefault(reason, []).append(size)
        for reason, without in failed.items():
            _log.warning("batch sizes without a CUDA graph", sizes=without[::-1], reason=reason)
        self._streams.give_back()
        self.weigh()
        return tuple(planned[::-1])

    def _capture(self, rows: Sequence[Array], size: int) -> str | None:
        """Why there is no graph of this size; None when there is one, and it answers as the network itself does.

        Compared on other rows than those it was captured with: a number that came from those would be built in.
        """
        samples = [[array[:size] for array in rows], [array[::-1][:size].copy() for array in rows]]
        batch: list[Tensor] = []
        try:
            expected = [self._answers(sample) for sample in samples]
            with self.judged(), torch.inference_mode():
                batch = self._gather([samples[0]], size, 0, Marks())
                self._streams.settle()
                self.graphs.capture(partial(self.forward, precision=self.precision), batch)
            got = [self._answers(sample) for sample in samples]
            same = all(agree(one, other) for one, other in zip(expected, got, strict=True))
            reason = None if same else "its answers differ from the network's own"
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - users' networks do what they like; without a graph they run as before
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        if reason is not None:
            self.graphs.drop(batch)
        return reason

    def _answers(self, sample: list[Array]) -> list[Array]:
        forward = self.run([sample], len(sample[0]), self.precision)
        return [array.copy() for array in (*forward.outputs, forward.finite)]
