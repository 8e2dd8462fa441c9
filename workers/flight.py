"""The batches under way on the device, in the order in which they are answered. Worker only.

On a device that works beside the host two may be: while one is computed, the next one's rows are copied, and it is
queued right behind. Elsewhere it is one, which runs when it is finished.
"""

from collections import deque
from collections.abc import Iterator

from shared.messages import BatchDone, RunBatch
from workers.backends.base import Device
from workers.engine import BatchRun
from workers.loaded import LoadedVersion


class Flight:
    """One per worker, used by its loop only."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._runs: deque[BatchRun] = deque()  # at most two: one per lane

    def admits(self, loaded: LoadedVersion) -> bool:
        """Whether a batch of this version may be started before those under way are finished."""
        return all(min(run.loaded.runner.lanes, loaded.runner.lanes) > len(self._runs) for run in self._runs)

    def start(self, run: BatchRun) -> None:
        """Begin with a batch that is admitted. Raises DeviceLost."""
        taken = {other.lane for other in self._runs}
        run.start(self._runs, 1 if 0 in taken else 0)
        self._runs.append(run)

    def first_done(self) -> bool:
        """Whether the first batch can be finished without waiting; after False `watch` tells when to ask again."""
        if not self._runs:
            return False
        self._device.quiet()  # first: a ring from here on ends the wait that follows
        return self._runs[0].done()

    def finish(self) -> tuple[RunBatch, BatchDone]:
        """The first batch and its answers; waits for them. Raises DeviceLost."""
        run = self._runs.popleft()
        return run.message, run.finish()

    def watch(self) -> tuple[int, ...]:
        """Descriptors that become readable when the first batch may be done."""
        fileno = self._device.fileno() if self._runs else None
        return () if fileno is None else (fileno,)

    def __iter__(self) -> Iterator[RunBatch]:
        return iter([run.message for run in self._runs])

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"<Flight {[run.message.batch for run in self._runs]}>"
