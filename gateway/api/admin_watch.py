"""`Admin.Watch`: the state whole, and then what has changed. A slow reader misses states in between, never the latest.

Nothing is queued for a reader: what it is told next is made from the state of that moment and what it was told last.
"""

import asyncio
from collections.abc import Callable

from gateway.api import admin_parse, admin_render
from gateway.api.admin_calls import only_message
from gateway.api.admin_render import Key
from gateway.api.interceptors import Call, Edge
from protos.headrace.v1 import admin_pb2 as pb
from shared.traffic import Traffic

REST_S = 0.02
"""After each message: what changes together, such as two versions' phases, is told together."""


class Watches:
    """All readers' common part. Event loop only."""

    def __init__(
        self,
        states: Callable[[], dict[Key, pb.VersionState]],
        traffic: Callable[[str], Traffic],
        memory: Callable[[], list[pb.WorkerMemory]],
    ) -> None:
        self._states = states
        self._traffic = traffic
        self._memory = memory
        self._changed = asyncio.Event()
        self._closed = False

    def notify(self) -> None:
        """Something changed: wake every reader."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self.notify()

    async def watch(self, edge: Edge, call: Call) -> None:
        """Until the caller leaves or the server stops."""
        request = await only_message(edge, call, pb.WatchRequest.FromString)
        name = admin_parse.model(request.model) if request.model else ""
        told = Told()
        while not self._closed:
            changed = self._changed
            message = told.difference(*self._now(name))
            if message is not None:
                await call.context.write(message.SerializeToString())
                await asyncio.sleep(REST_S)
            if changed is self._changed:
                await changed.wait()

    def _now(self, name: str) -> tuple[dict[Key, pb.VersionState], dict[str, pb.Traffic], list[pb.WorkerMemory]]:
        states = {key: state for key, state in self._states().items() if name in {"", key[0]}}
        names = dict.fromkeys(model for model, _ in states)
        traffic = {each: admin_render.traffic(self._traffic(each), last=1) for each in names}
        return states, traffic, self._memory()


class Told:
    """What one reader knows."""

    def __init__(self) -> None:
        self._whole = True
        self._states: dict[Key, pb.VersionState] = {}
        self._traffic: dict[str, pb.Traffic] = {}
        self._memory: list[pb.WorkerMemory] = []

    def difference(
        self, states: dict[Key, pb.VersionState], traffic: dict[str, pb.Traffic], memory: list[pb.WorkerMemory]
    ) -> pb.WatchResponse | None:
        """What it does not know yet, which it is told now; None: nothing."""
        message = pb.WatchResponse(
            whole=self._whole,
            versions=[state for key, state in states.items() if self._states.get(key) != state],
            removed=[pb.VersionState(model=name, version=version) for name, version in self._states.keys() - states],
            traffic=[
                pb.ModelTraffic(model=name, traffic=found)
                for name, found in traffic.items()
                if self._traffic.get(name) != found
            ],
            memory=memory if memory != self._memory else [],
        )
        self._whole, self._states, self._traffic, self._memory = False, states, traffic, memory
        nothing = not (message.whole or message.versions or message.removed or message.traffic or message.memory)
        return None if nothing else message
