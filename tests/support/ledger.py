"""A load of many callers with a ledger: every call's one outcome, so that nothing can get lost unseen."""

import asyncio
import threading
from collections import Counter
from types import TracebackType
from typing import Self

from headrace import AsyncClient, InferenceError
from tests.support.stack import Site

CALL_LIMIT_S = 10.0
"""Each call's own deadline."""
GRACE_S = 0.25
"""A call must end within its deadline and this (RELIABILITY promise 1)."""


def at_rest(site: Site) -> bool:
    """Everything that a request may hold has come back."""
    debug = site.debug()
    return (
        debug["in_flight"] == {"requests": 0, "rows": 0, "bytes": 0}
        and not any(debug["queues"].values())
        and debug["arena"]["leased"] == debug["arena"]["quarantined"] == 0
    )


class Load:
    """Callers in a thread of their own, each sending one request after the other until told to stop."""

    def __init__(
        self, address: str, image: bytes, *, model: str = "", callers: int = 16, timeout_s: float = CALL_LIMIT_S
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.overdue: list[float] = []
        self.wrong: list[object] = []
        self._address = address
        self._image = image
        self._model = model
        self._callers = callers
        self._timeout_s = timeout_s
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join(self._timeout_s + 20)
        if self._thread.is_alive():
            raise AssertionError(f"a call has not ended: {self.outcomes}")

    def stop(self) -> None:
        """No further calls; those under way end by themselves."""
        self._stop.set()

    def wait_for(self, outcome: str, more: int, limit_s: float = 30.0) -> None:
        """Until `more` further calls have ended with this outcome."""
        with self._changed:
            wanted = self.outcomes[outcome] + more
            if not self._changed.wait_for(lambda: self.outcomes[outcome] >= wanted, limit_s):
                raise AssertionError(f"waited {limit_s} s for {more} more {outcome}: {self.outcomes}")

    async def _run(self) -> None:
        async with AsyncClient(self._address, max_attempts=1) as client:
            expected = (await client.classify(self._image, model=self._model, timeout_s=self._timeout_s)).labels
            await asyncio.gather(*(self._caller(client, expected) for _ in range(self._callers)))

    async def _caller(self, client: AsyncClient, expected: object) -> None:
        loop = asyncio.get_running_loop()
        while not self._stop.is_set():
            started_s = loop.time()
            try:
                answer = await client.classify(self._image, model=self._model, timeout_s=self._timeout_s)
                outcome = "ok"
                if answer.labels != expected:
                    self.wrong.append(answer.labels)
            except InferenceError as error:
                outcome = error.reason or error.code.name.lower()
                # a refused caller comes back at once: pause for a turn, or a dead server is hammered
                await asyncio.sleep(0.01)
            took_s = loop.time() - started_s
            with self._changed:
                self.outcomes[outcome] += 1
                if took_s > self._timeout_s + GRACE_S:
                    self.overdue.append(took_s)
                self._changed.notify_all()
