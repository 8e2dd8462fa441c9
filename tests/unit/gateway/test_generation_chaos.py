"""Texts, callers and workers that come and go at random: each text has one end, and nothing is left behind."""

import asyncio
import random
from itertools import count

import pytest

from gateway.pauses import Pauses
from gateway.worker_client import Worker
from shared.errors import HeadraceError, InvalidInput, NotReady, Overloaded, ProcessLost
from tests.support.generation_parts import LIMIT_S, Reading, TextWorld

FORESEEN = (InvalidInput, Overloaded, ProcessLost, NotReady)
"""What may become of a text here: too long, no room, a worker lost, or the version given up."""


class Chaos:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a fixed order, no secret
        self.world = TextWorld(sequences=4, tokens=64)
        self.world.router.steps_by_itself = False
        self.names = (f"worker-{number}" for number in count())
        self.open: list[Reading] = []
        self.all: list[tuple[Reading, str, int, bool]] = []
        """Each with its prompt, its most tokens and whether its caller has left."""
        self.left: set[Reading] = set()

    def workers(self) -> list[Worker]:
        return list(self.world.workers.workers())

    async def act(self) -> None:
        kind = self.random.choices(("ask", "step", "leave", "die", "come", "evict", "rest"), (8, 12, 3, 1, 1, 1, 3))[0]
        await getattr(self, kind)()

    async def ask(self) -> None:
        prompt = "".join(self.random.choices("abcdefg.", k=self.random.randint(1, 12)))
        most = self.random.randint(1, 20)
        beams = self.random.choice((1, 1, 1, 2))
        self.open.append(self.world.begin(prompt, max_tokens=most, beams=beams))
        self.all.append((self.open[-1], prompt, most, beams > 1))
        await asyncio.sleep(0)  # it comes to the door

    async def step(self) -> None:
        self.world.router.step()
        await asyncio.sleep(0)

    async def leave(self) -> None:
        if self.open:
            reading = self.open.pop(self.random.randrange(len(self.open)))
            self.left.add(reading)
            await reading.leave()

    async def die(self) -> None:
        if self.workers():
            self.world.lose(self.random.choice(self.workers()))

    async def come(self) -> None:
        if len(self.workers()) < 3:
            self.world.greet(next(self.names))

    async def evict(self) -> None:
        if self.workers() and self.world.model.state.on_demand:
            worker = self.random.choice(self.workers())
            self.world.evict(worker)
            self.world.load(worker.identity)

    async def rest(self) -> None:
        self.world.generation.tick(Pauses())
        for _ in range(3):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Let all that is open come to its end."""
        if not self.workers():
            await self.come()
        self.world.router.steps_by_itself = True
        self.world.router._by_itself()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([reading.task for reading, *_ in self.all])


def expected(prompt: str, most: int) -> str:
    """As the played workers write it."""
    written = "".join(prompt[place % len(prompt)].upper() for place in range(most))
    return written.split(".")[0]


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("seed", range(12))
async def test_each_text_has_one_end_and_nothing_is_left(seed: int, on_demand: bool) -> None:
    chaos = Chaos(seed)
    world = chaos.world
    world.model.state.on_demand = on_demand
    try:
        await chaos.come()
        for _ in range(150):
            await chaos.act()
        await chaos.finish()
        await world.until("all room to be back", world.at_rest)
    finally:
        world.close()
    assert world.router.too_much == []
    ends = 0
    for reading, prompt, most, beams in chaos.all:
        if reading in chaos.left:
            continue
        error = reading.task.exception()
        if error is None:
            assert reading.parts[-1].end is not None
            assert [part.end for part in reading.parts[:-1]] == [None] * (len(reading.parts) - 1)
            assert reading.text.rstrip(".") == expected(prompt, most)
            ends += 1
        else:
            assert isinstance(error, FORESEEN), error
            assert isinstance(error, HeadraceError)
            assert beams or expected(prompt, most).startswith(reading.text)
    counted = sum(
        world.sample("headrace_requests_total", outcome=outcome)
        for outcome in ("ok", "cancelled", "overloaded", "process_lost", "invalid_input", "not_ready")
    )
    assert counted == len(chaos.all)
    assert world.sample("headrace_requests_total", outcome="ok") >= ends > 0
    assert world.generation.held.late == 0
