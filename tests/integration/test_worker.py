"""The worker process against a real greeting, arena and socket."""

import asyncio
import os
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from shared.clock import now_s
from shared.errors import Code, ExitCode
from shared.messages import (
    BatchDone,
    BatchItem,
    LoadModel,
    MemoryNote,
    ModelEvicted,
    ModelFailed,
    ModelLoaded,
    UnloadModel,
)
from shared.tensors import Tensor, as_array
from tests.support.fake_gateway import FakeGateway, gateway_in, greeted
from tests.support.worker_parts import WIDTH, batch, item, toy_model
from tests.support.worker_process import codes, load, simulated, worker_in

TORCH = "pipeline: toy:Toy\nbackend: torch\nnetwork: mine:network\n"
CODE = """
import os
import signal

import torch
from torch import nn


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rest = nn.Parameter(torch.zeros(REST))

    def forward(self, x):
        if (x[:, 0] == 666).any():
            raise RuntimeError("poison")
        if (x[:, 0] == 77).any():
            os.kill(os.getpid(), signal.SIGTERM)
        return self.linear(x) / (x[:, :1] != 13)


class Failing(Picky):
    def forward(self, x):
        raise RuntimeError("never")


def network():
    return Picky()


def failing():
    return Failing()
"""
TERMINATES = 77.0


def picky(folder: Path, hidden: int = 4) -> tuple[str, nn.Linear]:
    """The torch model of this file: its version, and what it computes. `hidden`: numbers that it holds besides."""
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, WIDTH)
    weights = {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}
    weights["rest"] = torch.zeros(hidden)
    files = {"w.safetensors": safetensors.torch.save(weights)}
    return toy_model(folder / "models", "toy", TORCH, files, CODE.replace("REST", str(hidden))).version, linear


async def test_a_batch_is_answered_and_sigterm_ends_with_0(tmp_path: Path) -> None:
    version = simulated(tmp_path)
    async with worker_in(tmp_path) as worker, gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        assert gateway.hellos[0].pid == worker.process.pid
        assert [(hello.worker, hello.device) for hello in gateway.hellos] == [("worker-0", "simulated")]
        loaded = await load(gateway, "sim", version)
        assert [rows for rows, _ in loaded.batch_s] == [1, 2, 4]
        gateway.send(batch(item(1, 5), item(2, 5), item(3, 6)))
        done = await gateway.next(BatchDone)
        first, second, third = (as_array(answer.tensors[0], None).tolist() for answer in done.answers)
        assert first == second != third
        worker.process.terminate()
        assert await worker.exit_code() == ExitCode.OK


async def test_rows_go_through_the_arena_both_ways(tmp_path: Path) -> None:
    version = simulated(tmp_path)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        await load(gateway, "sim", version)
        gateway.send(batch(item(1, 5)))
        expected = (await gateway.next(BatchDone)).answers[0].tensors[0].data
        given, taken = gateway.arena.lease(4 * WIDTH), gateway.arena.lease(4 * WIDTH)
        assert given is not None
        assert taken is not None
        given.view[:] = np.array([5, 0, 0, 0], "<f4").tobytes()
        through = BatchItem(2, 1e12, 1, [Tensor("x", "FP32", (1, WIDTH), given.ref)], [taken.ref])
        gateway.send(batch(through, number=2))
        (_, done) = await gateway.many(BatchDone, 2)
        assert done.answers[0].tensors[0].data == taken.ref
        assert bytes(taken.view) == expected


async def test_models_stay_loaded_when_the_gateway_dies_and_another_comes(tmp_path: Path) -> None:
    version = simulated(tmp_path)
    async with worker_in(tmp_path) as worker:
        async with gateway_in(tmp_path / "run") as gateway:
            await greeted(gateway)
            first = await load(gateway, "sim", version)
            gateway.send(batch(item(1, 5)))
            before = await gateway.next(BatchDone)
        async with gateway_in(tmp_path / "run") as gateway:
            await greeted(gateway)
            assert gateway.hellos[0].pid == worker.process.pid
            again = await load(gateway, "sim", version, model=7)
            assert again.load_s == first.load_s  # told from memory
            gateway.send(batch(item(1, 5), model=7))
            after = await gateway.next(BatchDone)
        assert before.answers[0].tensors[0].data == after.answers[0].tensors[0].data


async def test_either_side_may_start_first(tmp_path: Path) -> None:
    simulated(tmp_path)
    async with gateway_in(tmp_path / "run") as gateway, worker_in(tmp_path):
        await greeted(gateway)


async def test_sigterm_in_the_middle_of_a_batch_finishes_it_and_no_other(tmp_path: Path) -> None:
    version = picky(tmp_path)[0]
    async with worker_in(tmp_path) as worker, gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        await load(gateway, "toy", version)
        gateway.send(batch(item(1, TERMINATES), number=1))
        gateway.send(batch(item(2, 1), number=2))
        assert await worker.exit_code() == ExitCode.OK
        assert codes(await gateway.next(BatchDone)) == {1: None}
        assert [message.batch for message in gateway.received if isinstance(message, BatchDone)] == [1]
    assert worker.leftovers() == []


async def test_garbage_and_frames_of_another_life_are_ignored(tmp_path: Path) -> None:
    version = simulated(tmp_path)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        await load(gateway, "sim", version)
        header = gateway.generation.to_bytes(8, "little")
        for frame in (b"", b"x", header, header + b"\xc1", header + b"\x93\xa3run", os.urandom(4096), b"cos\nsystem\n"):
            gateway.router._socket.send_multipart([gateway.identity, frame])
        gateway.router._socket.send_multipart([gateway.identity, header, b"two frames"])
        gateway.send(batch(item(1, 5)))
        assert codes(await gateway.next(BatchDone)) == {1: None}


async def test_a_model_that_fails_to_load_and_batches_for_it_are_answered(tmp_path: Path) -> None:
    simulated(tmp_path)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        gateway.send(LoadModel(1, "absent", "0" * 16))
        gateway.send(LoadModel(2, "sim", "f" * 16))
        unknown_model, unknown_version = await gateway.many(ModelFailed, 2)
        assert unknown_model.failure.code == Code.UNKNOWN_MODEL
        assert unknown_version.failure.code == Code.UNKNOWN_VERSION
        gateway.send(batch(item(1, 5)))
        assert codes(await gateway.next(BatchDone)) == {1: Code.NOT_READY}


async def test_an_unloaded_model_is_gone(tmp_path: Path) -> None:
    version = simulated(tmp_path)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        await load(gateway, "sim", version)
        gateway.send(UnloadModel(1))
        gateway.send(batch(item(1, 5)))
        assert codes(await gateway.next(BatchDone)) == {1: Code.NOT_READY}


class Caller:
    """Sends batches as a gateway does: loads what is not there, and queues again what crossed with an eviction."""

    def __init__(self, gateway: FakeGateway, versions: dict[str, str]) -> None:
        self.versions = versions
        self.numbers = {name: number for number, name in enumerate(versions)}
        self._gateway = gateway
        self._batches = count()

    async def call(self, name: str) -> dict[int, str | None]:
        while True:
            if not self.is_loaded(name):
                await self.load(name)
            answer = await self._run(name, next(self._batches))
            if Code.NOT_READY not in answer.values():
                return answer

    async def _run(self, name: str, number: int) -> dict[int, str | None]:
        def answers() -> list[BatchDone]:
            return [done for done in self._of(BatchDone) if done.batch == number]

        self._gateway.send(batch(item(number, 5), model=self.numbers[name], number=number))
        await self._gateway.until(answers, f"batch {number} on {name}")
        return codes(answers()[0])

    async def load(self, name: str) -> None:
        after = len(self._gateway.received)
        self._gateway.send(LoadModel(self.numbers[name], name, self.versions[name], pinned=False))

        def told() -> bool:
            return any(message.model == self.numbers[name] for message in self._of(ModelLoaded, after))

        await self._gateway.until(told, f"{name} to be loaded")

    def is_loaded(self, name: str) -> bool:
        about = [message for message in self._of(ModelLoaded | ModelEvicted) if message.model == self.numbers[name]]
        return bool(about) and isinstance(about[-1], ModelLoaded)

    def _of(self, kind: Any, after: int = 0) -> list[Any]:  # noqa: ANN401 - a type, or a union of types
        return [message for message in self._gateway.received[after:] if isinstance(message, kind)]


async def test_three_models_with_room_for_two_all_answer_and_the_budget_holds(tmp_path: Path) -> None:
    versions = {name: simulated(tmp_path, name, a_ms=1.0, memory_bytes=40_000_000) for name in "abc"}
    async with worker_in(tmp_path, budget_bytes=100_000_000), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        caller, random = Caller(gateway, versions), Random(7)  # noqa: S311 - the same traffic each time

        async def traffic() -> None:
            for _ in range(40):
                (answer,) = (await caller.call(random.choice("abc"))).values()
                assert answer is None

        await asyncio.gather(*(traffic() for _ in range(3)))
        notes = [message for message in gateway.received if isinstance(message, MemoryNote)]
        assert notes[-1].evictions >= 5, "else this test has shown nothing"
        assert {note.budget_bytes for note in notes} == {100_000_000}
        assert max(note.models_bytes for note in notes) == 80_000_000
        assert {note.expected_bytes for note in notes} == {0, 40_000_000}
        assert all(note.process_bytes > 1_000_000 for note in notes)
        await gateway.until(lambda: notes[-1].loads - notes[-1].evictions <= 2, "the sums to agree")


async def test_a_pinned_model_stays_and_what_does_not_fit_beside_it_says_so(tmp_path: Path) -> None:
    small, large = simulated(tmp_path, "small", memory_bytes=40_000_000), simulated(tmp_path, "large", 0.0, 70_000_000)
    async with worker_in(tmp_path, budget_bytes=100_000_000), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        loaded = await load(gateway, "small", small)
        assert (loaded.memory_bytes, loaded.estimated_bytes) == (40_000_000, 40_000_000)
        assert set(loaded.stages_s) == {"wait", "read", "build", "warm_up"}
        assert sum(loaded.stages_s.values()) - loaded.stages_s["wait"] <= loaded.load_s
        gateway.send(LoadModel(2, "large", large))
        failure = (await gateway.next(ModelFailed)).failure
        assert failure.code == Code.NOT_READY
        assert failure.text == (
            "there is no room for model large now (worker.memory_budget_bytes; the log has the details)"
        )
        gateway.send(batch(item(1, 5)))
        assert codes(await gateway.next(BatchDone)) == {1: None}
        after = len(gateway.received)
        gateway.send(LoadModel(1, "small", small, pinned=False))
        await gateway.next(ModelLoaded, after)
        await load(gateway, "large", large, model=2)
        assert [message.model for message in gateway.received if isinstance(message, ModelEvicted)] == [1]


async def test_unloading_and_failed_loads_leave_no_memory_behind(tmp_path: Path) -> None:
    version, _ = picky(tmp_path, hidden=3_000_000)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)

        async def once() -> MemoryNote:
            loaded = await load(gateway, "toy", version)
            assert loaded.memory_bytes > 12_000_000
            after = len(gateway.received)
            gateway.send(UnloadModel(1))
            return await gateway.next(MemoryNote, after)

        first = [await once() for _ in range(3)][-1]
        notes = [await once() for _ in range(50)]
        # Together: each figure is of the whole process, and a page that another thread has touched meanwhile is in one.
        assert sum(note.freed_bytes for note in notes) > 0.8 * sum(note.expected_bytes for note in notes) > 0
        assert notes[-1].process_bytes - first.process_bytes < 50_000_000
        for number in range(50):
            after = len(gateway.received)
            gateway.send(
                LoadModel(
                    9, "toy", version, config=(TORCH + f"# {number}\n").replace("network\n", "failing\n").encode()
                )
            )
            assert (await gateway.next(ModelFailed, after)).failure.code == Code.NOT_READY
        last = await once()
        assert last.process_bytes - first.process_bytes < 50_000_000


async def test_a_refused_worker_tries_again(tmp_path: Path) -> None:
    simulated(tmp_path)
    async with gateway_in(tmp_path / "run") as gateway:
        gateway.refuse_with = "worker-0 is connected already"
        async with worker_in(tmp_path):
            await gateway.until(lambda: gateway.hellos, "a first Hello")
            gateway.refuse_with = None
            await greeted(gateway)


async def test_a_second_worker_of_the_same_number_is_refused(tmp_path: Path) -> None:
    simulated(tmp_path)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        async with worker_in(tmp_path) as second:
            assert await second.exit_code() == ExitCode.IN_USE
            assert "worker-0 already runs" in second.stderr()
        async with worker_in(tmp_path, "--index", "1"):
            await gateway.until(lambda: len(gateway.hellos) == 2, "the other worker's Hello")
            assert gateway.hellos[1].worker == "worker-1"


async def test_a_killed_worker_is_known_at_once_and_its_lock_is_free(tmp_path: Path) -> None:
    simulated(tmp_path)
    async with gateway_in(tmp_path / "run") as gateway:
        async with worker_in(tmp_path) as worker:
            await greeted(gateway)
            worker.process.kill()
            await gateway.until(lambda: gateway.lost, "the loss of the worker")
        async with worker_in(tmp_path):
            await gateway.until(lambda: len(gateway.hellos) == 2, "the next worker's Hello")


async def test_a_torch_model_through_the_process(tmp_path: Path) -> None:
    version, linear = picky(tmp_path)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        assert gateway.hellos[0].device == "cpu"
        loaded = await load(gateway, "toy", version)
        assert loaded.precision == "fp32"
        expired = item(5, 3, deadline_s=now_s() - 1)
        gateway.send(batch(item(1, 1), item(2, 666), item(3, 13), item(4, 2, 3), expired, padded_rows=8))
        done = await gateway.next(BatchDone)
        assert codes(done) == {
            1: None,
            2: Code.INTERNAL,
            3: Code.NONFINITE_OUTPUT,
            4: None,
            5: Code.DEADLINE_EXCEEDED,
        }
        rows = torch.zeros(2, 4)
        rows[:, 0] = torch.tensor([2.0, 3.0])
        got = as_array(done.answers[3].tensors[0], None)
        np.testing.assert_allclose(got, linear(rows).detach().numpy(), rtol=1e-5)
