"""What must hold whatever happens: calls of any kind, callers that leave, processes that die, in any order.

The gateway's own code in virtual time, between a pool and two workers (tests/support/virtual_server.py).
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.pool_client import CREDIT
from shared.settings import AdmissionSettings
from tests.support import virtual_time
from tests.support.simulation import repeatable
from tests.support.virtual_processes import POISON
from tests.support.virtual_server import PLAIN, VirtualServer, Words, model

STAGED = 2
PROCESSES = 2
LOOK_S = 0.0007
"""Between two looks at what is held; no multiple of anything else."""
COST_S = {1: (0.004, 0.001), 2: (0.030, 0.0)}


@dataclass(frozen=True)
class Ask:
    """A call of one or many inputs, and after how long its caller leaves (0: it stays)."""

    at_s: float
    model: int
    patience_s: float
    priority: int
    leaves_after_s: float
    words: Words


@dataclass(frozen=True)
class Death:
    """Of the pool process or worker at this place, if there is one then."""

    at_s: float
    of_worker: bool
    place: int


TIMES = st.integers(0, 100).map(lambda ms: ms / 1024)
ASKS = st.builds(
    Ask,
    at_s=TIMES,
    model=st.sampled_from([1, 1, 2]),
    patience_s=st.sampled_from([0.001, 0.01, 0.03, 0.1, 0.5]),
    priority=st.sampled_from([100, 100, 1, 200]),
    leaves_after_s=st.sampled_from([0.0, 0.0, 0.0, 0.002, 0.01, 0.05]),
    words=st.sampled_from([PLAIN] * 9 + [PLAIN * 2] * 3 + [PLAIN * 6] * 3 + [(b"", POISON)]),
)
DEATHS = st.builds(Death, at_s=TIMES, of_worker=st.booleans(), place=st.integers(0, 1))


class Play:
    """One story; the watch looks at everything that is limited, all the time."""

    def __init__(self) -> None:
        models = [model(1, max_rows=4), model(2, max_rows=2, name="slow", inline=False)]
        self.server = VirtualServer(
            models,
            lambda number, rows: COST_S[number][0] + COST_S[number][1] * rows,
            processes=PROCESSES,
            prepare_s=lambda: 0.002,
            workers=2,
            admission=AdmissionSettings(max_requests=40),
        )
        self.limits = {made.number: made.limits.max_rows for made in models}

    async def run(self, asks: list[Ask], deaths: list[Death]) -> None:
        loop = asyncio.get_running_loop()
        calls: list[asyncio.Task[None]] = []

        def ask(number: int, one: Ask) -> None:
            call = self.server.call(number, one.patience_s, model=one.model, priority=one.priority, words=one.words)
            calls.append(task := loop.create_task(call))
            if one.leaves_after_s:
                loop.call_later(one.leaves_after_s, task.cancel)

        for number, one in enumerate(asks):
            loop.call_later(one.at_s, ask, number, one)
        for death in deaths:
            loop.call_later(death.at_s, self.kill, death)
        watch = loop.create_task(self.watch())
        await asyncio.sleep(5.0)  # of virtual time: far more than any deadline
        watch.cancel()
        assert len(calls) == len(asks)
        assert all(call.done() for call in calls)
        self.check_the_end(asks)
        self.server.close()

    def kill(self, death: Death) -> None:
        if death.of_worker:
            workers = list(self.server.workers.workers())
            for worker in workers[death.place : death.place + 1]:
                self.server.router.die(worker)
        else:
            self.server.pool_processes.kill(list(self.server.pool_processes.ready())[death.place])

    async def watch(self) -> None:
        for _ in range(1000):
            await asyncio.sleep(LOOK_S)  # of virtual time
            self.check_now()

    def check_now(self) -> None:
        server = self.server
        for made in server.models:
            held = server.leases._held_rows.get(made.number, 0)
            assert 0 <= held <= (1 + STAGED * made.workers) * made.limits.max_rows
            assert made.rows_in_flight >= made.preparing_rows >= 0
            assert made.rows_in_flight >= 0 <= made.unprepared_items
        for identity in server.pool_processes.ready():
            assert 0 <= server.jobs.count(identity.decode()) <= CREDIT
        for worker in server.workers.workers():
            assert 0 <= server.dispatch.outstanding(worker) <= STAGED
        assert 0 <= server.admission.in_flight_requests <= 40

    def check_the_end(self, asks: list[Ask]) -> None:
        server = self.server
        assert sorted(call.number for call in server.calls) == list(range(len(asks)))  # exactly one end for each
        assert server.wrong == []  # nobody got another one's answer, or read memory that was given away
        assert server.at_rest()
        assert server.router.most_held <= STAGED
        assert server.router.late == []  # nothing was sent after its deadline
        assert server.router.suspects_in_company == []
        for _, batch in server.router.sent:
            assert sum(item.rows for item in batch.items) <= batch.padded_rows <= self.limits[batch.model]
            deadlines = [item.deadline_s for item in batch.items]
            assert deadlines == sorted(deadlines)
        for call in server.calls:
            assert call.ended_s <= call.deadline_s + 1e-6
            assert call.outcome != "internal"
            if not asks[call.number].leaves_after_s:
                assert call.outcome != "left"


@settings(deadline=None, max_examples=40)
@given(st.lists(ASKS, max_size=40), st.lists(DEATHS, max_size=4))
def test_each_call_ends_once_in_time_with_its_own_answer_and_nothing_stays_behind(
    asks: list[Ask], deaths: list[Death]
) -> None:
    virtual_time.run(lambda: Play().run(asks, deaths))


def test_so_it_is_in_crowds_with_many_deaths() -> None:
    """Denser than what is found by search: batches are full when their worker dies."""
    plays = [virtual_time.run(partial(told, *crowd(repeatable(seed)))) for seed in range(8)]
    assert sum(len(play.server.router.suspects) for play in plays) >= 10


def crowd(random: Random) -> tuple[list[Ask], list[Death]]:
    asks = [
        Ask(
            at_s=random.randrange(100) / 1024,
            model=random.choice([1, 1, 2]),
            patience_s=random.choice([0.03, 0.1, 0.5]),
            priority=random.choice([100, 100, 1]),
            leaves_after_s=random.choice([0.0, 0.0, 0.0, 0.01]),
            words=random.choice([PLAIN, PLAIN, PLAIN * 3, (b"", b"", POISON) if random.random() < 0.2 else PLAIN]),
        )
        for _ in range(40)
    ]
    deaths = [Death(random.randrange(100) / 1024, random.random() < 0.7, random.randrange(2)) for _ in range(4)]
    return asks, deaths


async def told(asks: list[Ask], deaths: list[Death]) -> Play:
    play = Play()
    await play.run(asks, deaths)
    return play


@settings(deadline=None, max_examples=30)
@given(st.lists(TIMES, min_size=1, max_size=40), st.integers(1, 3))
def test_equal_deadlines_are_served_in_order_of_arrival(times: list[float], leave_every: int) -> None:
    """One pool process, one worker; some callers leave."""

    async def main() -> None:
        server = VirtualServer([model()], lambda _m, rows: 0.002 * rows, prepare_s=lambda: 0.001)
        loop = asyncio.get_running_loop()
        start_s, calls = loop.time(), list[asyncio.Task[None]]()

        def ask() -> None:
            number = len(calls)  # the loop may turn round what is due at the same moment
            calls.append(loop.create_task(server.call(number, start_s + 10.0 - loop.time())))
            if number % leave_every:
                loop.call_later(0.0015, calls[-1].cancel)

        for at_s in times:
            loop.call_at(start_s + at_s, ask)
        await asyncio.sleep(5.0)  # of virtual time
        numbers = [call.number for call in server.calls if call.outcome == "ok"]
        assert numbers == sorted(numbers)
        assert len(server.calls) == len(times)
        server.close()

    virtual_time.run(main)
