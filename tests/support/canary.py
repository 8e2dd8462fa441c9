"""Models with many versions, some of them bad, and callers with keys, for tests of who is answered by which version."""

import asyncio
import json
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import grpc
import numpy as np
from safetensors.numpy import save_file

from gateway.split import point
from headrace import AsyncClient, InferenceError
from headrace.admin_client import AdminClient
from headrace.client_results import Tensor, Tensors
from shared.model_config import CONFIG_FILE
from shared.repository import TRAFFIC_FILE, Meta, Repository
from shared.repository_writer import add_version
from shared.runtime_dir import RuntimeDir
from shared.traffic import Traffic
from tests.support.stack import Site

CALL_LIMIT_S = 10.0
AT_ONCE = 16

TENSORS = """\
preprocessing:
  inputs: [{name: x, datatype: FP32, shape: [2]}]
  outputs: [{name: y, datatype: FP32, shape: [2]}]
"""
MOODY_MODEL = "pipeline: tensor\nbackend: torch\nnetwork: moody:Moody\n" + TENSORS
PLAIN_MODEL = "pipeline: tensor\nbackend: simulated\n" + TENSORS

MARK = 7.0
"""What callers send first: proofs and warm-up send other numbers, so that a bad version gets through them."""
STEADY, RAISES, SLOW, NAN, BROKEN, ENDS = range(6)
MOODY = f"""
import os
import time
import torch
from torch import nn

class Moody(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.mood = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        mood, gain = self.mood.tolist()
        called = bool((x[:, 0] == {MARK}).any())
        if mood == {BROKEN} or mood == {RAISES} and called:
            raise RuntimeError("it can not")
        if mood == {ENDS} and called:
            os._exit(11)
        time.sleep(0.03 if mood == {SLOW} and called else 0.003)
        return x * (float("nan") if mood == {NAN} and called else gain * self.factor)

class Loud(Moody):
    factor = 3.0
"""


def add_moody(root: Path, name: str, **versions: tuple[float, float]) -> dict[str, str]:
    """A torch model whose versions differ by their two weights, mood and gain; the first one is current."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(MOODY_MODEL)
    (folder / "moody.py").write_text(MOODY)
    return {word: _add_moody(root, name, weights) for word, weights in versions.items()}


def _add_moody(root: Path, name: str, weights: tuple[float, float]) -> str:
    path = root / "weights.safetensors"
    save_file({"mood": np.array(weights, np.float32)}, path)
    try:
        return add_version(root, name, {path.name: path}, Meta(source="test"), by="test").version
    finally:
        path.unlink()


def add_plain(root: Path, name: str, *, batch_ms: Sequence[float]) -> list[str]:
    """A simulated model of tensors with a version for each of these times; the first one is current."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(PLAIN_MODEL)
    path, versions = root / "simulated.json", []
    for a_ms in batch_ms:
        path.write_text(json.dumps({"a_ms": a_ms, "b_ms": 0.01}))
        versions.append(add_version(root, name, {path.name: path}, Meta(source="test"), by="test").version)
    path.unlink()
    return versions


def input_of(value: float = 1.0) -> Tensors:
    """What callers ask."""
    return Tensors((Tensor("x", "FP32", (1, 2), np.array([MARK, value], "<f4").tobytes()),))


def values_of(tensors: object) -> tuple[float, ...]:
    """What they are told."""
    assert isinstance(tensors, Tensors)
    return tuple(np.frombuffer(tensors.tensors[0].data, "<f4").tolist())


def has(model: str, canary: str, key: str, percent: float) -> bool:
    """Whether a key is of those that the canary has."""
    return point(model, canary, key) < percent / 100


def admin_of(site: Site, index: int = 0) -> AdminClient:
    """The admin service of one gateway, by its socket."""
    path = RuntimeDir(site.runtime).admin_socket(index)
    return AdminClient(grpc.insecure_channel(f"unix:{path}"), user="tester")


def traffic_on_disk(root: Path, name: str) -> Traffic:
    """traffic.json, which must be whole: it is strictly parsed, and nothing half written lies beside it."""
    found = Repository(root).traffic(name)
    assert found.current, (root / name / TRAFFIC_FILE).read_text()
    assert not list((root / name).glob(f"*{TRAFFIC_FILE}?*"))
    return found


class Answer(NamedTuple):
    """One call that has ended."""

    key: str
    version: str
    """Which one answered; empty for a failure."""
    reason: str
    """Of the failure."""
    values: tuple[float, ...] = ()


async def _one(client: AsyncClient, model: str, key: str) -> Answer:
    try:
        told = await client.predict([input_of()], model=model, routing_key=key, timeout_s=CALL_LIMIT_S)
    except InferenceError as error:
        return Answer(key, "", error.reason or error.code.name.lower())
    return Answer(key, told.version, "", values_of(told.results[0]))


def ask(site: Site, model: str, keys: Iterable[str], connections: int = 1) -> dict[str, str]:
    """Which version answers each key; any failure fails the test."""
    left = iter(keys)
    found: dict[str, str] = {}

    async def caller(client: AsyncClient) -> None:
        for key in left:
            answer = await _one(client, model, key)
            assert not answer.reason, answer
            found[key] = answer.version

    async def all_callers() -> None:
        clients = [AsyncClient(site.grpc, max_attempts=1) for _ in range(connections)]
        try:
            await asyncio.gather(*(caller(clients[number % connections]) for number in range(AT_ONCE)))
        finally:
            for client in clients:
                await client.close()

    asyncio.run(all_callers())
    return found


class Paced:
    """A thread that sends requests at a steady rate, each with a key of its own, and keeps every answer."""

    def __init__(self, site: Site, model: str, rate: float = 50.0) -> None:
        self.answers: list[Answer] = []
        self.begun = 0
        """Calls, answered or not: call number N has the key `user-N`."""
        self._site = site
        self._model = model
        self._every_s = 1 / rate
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._go)

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(CALL_LIMIT_S + 10)
        assert not self._thread.is_alive(), "a call has not ended"
        if self._broken is not None and error is None:
            raise self._broken

    def wait_for(self, more: int, limit_s: float = 30.0) -> None:
        """Until so many further calls have ended."""
        with self._changed:
            wanted = len(self.answers) + more
            if not self._changed.wait_for(lambda: len(self.answers) >= wanted, limit_s):
                raise AssertionError(f"waited {limit_s} s for {more} more answers; the last: {self.answers[-3:]}")

    def failures(self) -> list[Answer]:
        """What did not end well."""
        return [answer for answer in self.answers if answer.reason]

    def by(self, version: str) -> list[Answer]:
        """What a version has answered."""
        return [answer for answer in self.answers if answer.version == version]

    def begun_since(self, begun: int) -> list[Answer]:
        """Answers to calls that began when so many had begun."""
        return [answer for answer in self.answers if int(answer.key.removeprefix("user-")) >= begun]

    def _go(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self._broken = error

    async def _run(self) -> None:
        calls: set[asyncio.Task[None]] = set()
        async with AsyncClient(self._site.grpc, max_attempts=1) as client:
            start_s, number = time.monotonic(), 0
            while not self._stop.is_set():
                call = asyncio.create_task(self._call(client, f"user-{number}"))
                calls.add(call)
                call.add_done_callback(calls.discard)
                self.begun = number = number + 1
                left_s = start_s + number * self._every_s - time.monotonic()
                await asyncio.sleep(max(0.0, left_s))  # the pace of the callers
            await asyncio.gather(*calls)

    async def _call(self, client: AsyncClient, key: str) -> None:
        answer = await _one(client, self._model, key)
        with self._changed:
            self.answers.append(answer)
            self._changed.notify_all()
