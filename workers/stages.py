"""What a load spends its time on. No torch."""

import contextlib
from collections.abc import Iterator

from shared.clock import Clock, now_s


class Stages:
    """Seconds by stage. A stage inside another one is not part of it, so that the sum is the whole."""

    def __init__(self, clock: Clock = now_s) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._open: list[str] = []
        self._since_s = 0.0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Everything in the block is the stage `name`."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now_s = self._clock()
        if self._open:
            stage = self._open[-1]
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now_s - self._since_s
        self._since_s = now_s

    def __repr__(self) -> str:
        return f"<Stages {self.seconds}>"
