"""Loads versions for the requests that want them, and lets the requests wait meanwhile. Lives on the event loop."""

import asyncio
from collections.abc import Callable

from gateway.served import ServedModel
from gateway.worker_client import WorkerClient
from shared.errors import NotReady


class Demand:
    """Of versions that are loaded on demand; how many requests may wait is the admission's affair."""

    def __init__(self, workers: WorkerClient, wanted: Callable[[ServedModel], None]) -> None:
        """`wanted(model)` notes that it is being loaded from now on."""
        self._workers = workers
        self._wanted = wanted
        self._waiting: dict[int, list[tuple[ServedModel, asyncio.Future[None]]]] = {}

    def load(self, model: ServedModel) -> None:
        """Have a version loaded that no worker has; nothing to do for one that is always there."""
        if model.pinned:
            return
        if model.state.phase == "on_demand":
            self._wanted(model)
        self._workers.demand(model.number)

    async def ready(self, model: ServedModel) -> None:
        """Wait until the version can run. Raises NotReady when it can't be loaded."""
        self.load(model)
        while model.waits_for_load:
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiter = model, changed
            self._waiting.setdefault(model.number, []).append(waiter)
            try:
                await changed
            finally:
                self._leave(waiter)
        if model.state.phase != "ready":
            raise NotReady(f"model {model.name!r} can't be loaded: {model.state.reason}")

    def changed(self) -> None:
        """Some version's phase has changed."""
        for waiting in self._waiting.values():
            if not waiting[0][0].waits_for_load:
                for _, future in waiting:
                    if not future.done():
                        future.set_result(None)

    def again(self) -> None:
        """A worker has come: it may have to load what requests wait for."""
        for waiting in list(self._waiting.values()):
            self.load(waiting[0][0])

    def waiting(self) -> int:
        """Requests that wait for a load."""
        return sum(map(len, self._waiting.values()))

    def _leave(self, waiter: "tuple[ServedModel, asyncio.Future[None]]") -> None:
        number = waiter[0].number
        waiting = self._waiting[number]
        waiting.remove(waiter)
        if not waiting:
            del self._waiting[number]
