from collections.abc import AsyncIterator, Callable

import pytest

from gateway.served import ServedModel
from shared.settings import WorkerSettings
from tests.support.dispatch_bench import Bench


@pytest.fixture
async def bench() -> AsyncIterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*models: ServedModel, limits: WorkerSettings | None = None) -> Bench:
        made.append(Bench(*models, limits=limits))
        return made[-1]

    yield make
    for each in made:
        if each.dispatch._timer is not None:
            each.dispatch._timer.cancel()
        each.arena.close()
