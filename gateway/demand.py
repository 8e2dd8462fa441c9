"""Loads versions for the requests that want them, and lets the requests wait meanwhile. Lives on the event loop."""

import asyncio
from collections.abc import Callable, Iterable

from gateway.served import ServedModel
from gateway.worker_client import WorkerClient
from shared.errors import NotReady

_GO_ON = {"ready", "no_worker"}
"""Where the worker was lost after it had loaded the version, what is prepared waits for another one (`Parked`)."""


class _Waiting:
    """Requests that wait for one version."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.futures: list[asyncio.Future[None]] = []
        self.timer: asyncio.TimerHandle | None = None
        """Runs while there is no worker that could load it."""

    @property
    def is_lost(self) -> bool:
        """No worker is there; one that died, of an input say, comes back in a moment."""
        return self.model.state.phase == "no_worker"

    def wake(self) -> None:
        """Let the requests see what has become of it."""
        self.stop_timer()
        for future in self.futures:
            if not future.done():
                future.set_result(None)

    def give_up(self) -> None:
        """No worker has come back in time."""
        for future in self.futures:
            if not future.done():
                future.set_exception(_cannot(self.model))

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Demand:
    """Of versions that are loaded on demand; how many requests may wait is the admission's affair."""

    def __init__(
        self,
        workers: WorkerClient,
        wanted: Callable[[ServedModel], None],
        parked: Callable[[], Iterable[ServedModel]],
        return_limit_s: float,
    ) -> None:
        """`wanted(model)` notes that it is being loaded from now on.

        `parked()`: versions that prepared items wait for, without a request that waits here. `return_limit_s`: how
        long requests wait for a worker to come back (`worker.return_limit_ms`).
        """
        self._workers = workers
        self._wanted = wanted
        self._parked = parked
        self._return_limit_s = return_limit_s
        self._waiting: dict[int, _Waiting] = {}

    def load(self, model: ServedModel) -> None:
        """Have a version loaded that no worker has; nothing to do for one that is always there."""
        if model.pinned:
            return
        if model.state.phase == "on_demand":
            self._wanted(model)
        self._workers.demand(model.number)

    async def ready(self, model: ServedModel) -> None:
        """Wait until the version can run. Raises NotReady when it can't be loaded."""
        while model.waits_for_load:  # again where it was given up for another one before this request could go on
            self.load(model)
            await self._changed(model)
        if model.state.phase not in _GO_ON:
            raise _cannot(model)

    def changed(self) -> None:
        """Some version's phase has changed."""
        for waiting in self._waiting.values():
            if waiting.model.waits_for_load:
                waiting.stop_timer()
                if waiting.model.state.phase == "on_demand":  # given up before these requests could go on
                    self.load(waiting.model)
            elif not waiting.is_lost:
                waiting.wake()
            elif waiting.timer is None:
                waiting.timer = asyncio.get_running_loop().call_later(self._return_limit_s, waiting.give_up)

    def again(self) -> None:
        """A worker has come: it may have to load what requests, or prepared items, wait for."""
        for model in {*(waiting.model for waiting in self._waiting.values()), *self._parked()}:
            self.load(model)

    def waiting(self) -> int:
        """Requests that wait for a load."""
        return sum(len(waiting.futures) for waiting in self._waiting.values())

    async def _changed(self, model: ServedModel) -> None:
        """Until it is loaded, or won't be."""
        waiting = self._waiting.setdefault(model.number, _Waiting(model))
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.futures.append(changed)
        try:
            await changed
        finally:
            waiting.futures.remove(changed)
            if not waiting.futures:
                waiting.stop_timer()
                self._waiting.pop(model.number, None)


def _cannot(model: ServedModel) -> NotReady:
    return NotReady(f"model {model.name!r} can't be loaded: {model.state.reason}")
