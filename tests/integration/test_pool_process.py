"""A real pool process: the gateway's side is a Router and an Arena in the test."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from shared.arena import Arena, Slot
from shared.clock import FOREVER_S
from shared.messages import (
    FromPool,
    JobFailed,
    OpenPipeline,
    PipelineOpened,
    PipelineRefused,
    PoolReady,
    Prepared,
    PrepareJob,
    Stop,
    ToPool,
)
from shared.transport import Router
from tests.support.damage import CORPUS, damaged
from tests.support.pictures import bicubic_crop, bomb_png, difference, encode, photo
from tests.support.stack import simulated_repository

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 20.0
GENERATION = 77
IDENTITY = b"pool-0.1"
NO_OPTIONS = msgspec.msgpack.encode({})


class Pool:
    """One process and what it said."""

    def __init__(self, folder: Path, **settings: str) -> None:
        repository = simulated_repository(folder / "models")
        lines = [f"repository: {repository}", "pool:", *(f"  {key}: {value}" for key, value in settings.items())]
        config = folder / "headrace.yaml"
        config.write_text("\n".join(lines if settings else lines[:1]))
        self.arena = Arena.create(1 << 22)
        self.router: Router[FromPool, ToPool] = Router(
            f"ipc://{folder}/pool.sock", FromPool, generation=GENERATION, high_water_mark=64
        )
        self.heard: asyncio.Queue[FromPool] = asyncio.Queue()
        self.router.start(asyncio.get_running_loop(), lambda _identity, message: self.heard.put_nowait(message))
        self.log = (folder / "log").open("w+b")
        argv = [sys.executable, "-m", "preprocess_pool", "--config", str(config), "--generation", str(GENERATION)]
        argv += ["--endpoint", f"ipc://{folder}/pool.sock", "--identity", IDENTITY.decode()]
        argv += ["--arena-fd", str(self.arena.fd), "--arena-bytes", str(self.arena.nbytes)]
        self.process = subprocess.Popen(argv, cwd=ROOT, pass_fds=(self.arena.fd,), stderr=self.log)

    async def hear(self, what: str) -> FromPool:
        try:
            async with asyncio.timeout(LIMIT_S):
                return await self.heard.get()
        except TimeoutError:
            raise AssertionError(f"waited {LIMIT_S} s for {what}; log: {self.text()}") from None

    async def start(self) -> None:
        assert await self.hear("PoolReady") == PoolReady()
        assert self.router.send(IDENTITY, OpenPipeline(1, "sim", ""))
        assert await self.hear("PipelineOpened") == PipelineOpened(1)

    async def prepare(self, data: bytes, slot: Slot, job: int = 1, deadline_s: float = FOREVER_S) -> FromPool:
        assert self.router.send(IDENTITY, PrepareJob(job, deadline_s, 1, "image", data, NO_OPTIONS, [slot.ref]))
        return await self.hear(f"the answer to job {job}")

    def slot(self) -> Slot:
        slot = self.arena.lease(224 * 224 * 3)
        assert slot is not None
        return slot

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read().decode()

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, LIMIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.router.close()
        self.arena.close()
        self.log.close()


@pytest.fixture
async def pool(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    pool = Pool(tmp_path, **getattr(request, "param", {}))
    try:
        await pool.start()
        yield pool
    finally:
        pool.close()


def pixels(slot: Slot) -> Any:  # noqa: ANN401 - an array
    return np.frombuffer(slot.view, np.uint8).reshape(224, 224, 3)


async def test_an_image_goes_through_the_arena(pool: Pool) -> None:
    data = encode(photo(500, 375), "JPEG", quality=92)
    with pool.slot() as slot:
        answer = await pool.prepare(data, slot)
        assert isinstance(answer, Prepared)
        assert 0 < answer.elapsed_s < LIMIT_S
        assert answer.tensors[0].data == slot.ref
        assert difference(pixels(slot), bicubic_crop(data, 224)) < 1.5


async def test_it_neither_has_torch_nor_a_gpu_nor_open_doors(pool: Pool) -> None:
    process = psutil.Process(pool.process.pid)
    with pool.slot() as slot:
        await pool.prepare(encode(photo(50, 50), "PNG"), slot)
    assert not any("torch" in mapped.path for mapped in process.memory_maps())
    assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
    assert process.rlimit(psutil.RLIMIT_AS)[0] < 4 << 30
    assert 7 <= process.rlimit(psutil.RLIMIT_CPU)[0] < 7 + LIMIT_S  # for one job, beyond what the start has used
    assert process.net_connections(kind="inet") == []


async def test_memory_is_reused_from_image_to_image(pool: Pool) -> None:
    def page_faults() -> int:
        return int(Path(f"/proc/{pool.process.pid}/stat").read_text().split()[9])

    data = encode(photo(500, 375), "JPEG")
    with pool.slot() as slot:
        for job in range(10):
            await pool.prepare(data, slot, job)
        before = page_faults()
        for job in range(20):
            await pool.prepare(data, slot, job)
    assert page_faults() - before < 20 * 50  # 240 an image with malloc's defaults


async def test_a_bomb_is_refused_at_once_and_needs_no_memory(pool: Pool) -> None:
    bomb = await asyncio.to_thread(bomb_png, 30_000, 30_000)
    with pool.slot() as slot:
        answer = await pool.prepare(bomb, slot)
    assert isinstance(answer, JobFailed)
    assert answer.failure.code == "invalid_input"
    assert "30000 × 30000 pixels, more than pool.max_pixels (50000000)" in answer.failure.text
    assert psutil.Process(pool.process.pid).memory_info().rss < 300 << 20


async def test_damaged_images_never_cost_the_process_and_leave_no_noise(pool: Pool) -> None:
    good = encode(photo(300, 300), "PNG")
    with pool.slot() as slot:
        for number, file in enumerate(CORPUS):
            for seed in range(10):
                answer = await pool.prepare(damaged(file, seed), slot, number)
                assert isinstance(answer, Prepared | JobFailed)
                if isinstance(answer, JobFailed):
                    assert answer.failure.code == "invalid_input"
        assert isinstance(await pool.prepare(good, slot), Prepared)
        assert difference(pixels(slot), bicubic_crop(good, 224)) < 1.5
    assert pool.text() == ""


async def test_a_late_job_is_answered_without_work(pool: Pool) -> None:
    with pool.slot() as slot:
        slot.view[:] = bytes(len(slot.view))
        answer = await pool.prepare(encode(photo(300, 300), "PNG"), slot, deadline_s=0.0)
        assert isinstance(answer, JobFailed)
        assert answer.failure.code == "deadline_exceeded"
        assert not any(slot.view)


async def test_a_staged_job_is_answered_before_stop(pool: Pool) -> None:
    data = encode(photo(300, 300), "PNG")
    with pool.slot() as slot:
        for job in (1, 2):
            pool.router.send(IDENTITY, PrepareJob(job, FOREVER_S, 1, "image", data, NO_OPTIONS, [slot.ref]))
        pool.router.send(IDENTITY, Stop())
        answers = [await pool.hear(f"job {job}") for job in (1, 2)]
        assert [answer.job for answer in answers if isinstance(answer, Prepared)] == [1, 2]
        assert await pool.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_is_an_asked_for_stop(pool: Pool, number: signal.Signals) -> None:
    pool.process.send_signal(number)
    assert await pool.exit_code() == 0
    assert pool.text() == ""


async def test_an_unknown_model_is_refused(pool: Pool) -> None:
    pool.router.send(IDENTITY, OpenPipeline(2, "nobody", ""))
    answer = await pool.hear("PipelineRefused")
    assert isinstance(answer, PipelineRefused)
    assert (answer.model, answer.failure.code) == (2, "unknown_model")


@pytest.mark.parametrize("pool", [{"memory_bytes": str(256 << 20), "max_pixels": "400000000"}], indirect=True)
async def test_the_memory_limit_holds_where_the_pixel_limit_does_not(pool: Pool) -> None:
    bomb = await asyncio.to_thread(bomb_png, 18_000, 18_000)  # 0.97 GB as RGB
    with pool.slot() as slot:
        answer = await pool.prepare(bomb, slot)
        assert isinstance(answer, JobFailed)
        assert answer.failure.code == "invalid_input"
        assert isinstance(await pool.prepare(encode(photo(300, 300), "PNG"), slot), Prepared)


def test_a_foreign_arena_is_an_error_at_start(tmp_path: Path) -> None:
    config = tmp_path / "headrace.yaml"
    config.write_text(f"repository: {simulated_repository(tmp_path / 'models')}")
    argv = [sys.executable, "-m", "preprocess_pool", "--config", str(config), "--generation", "1"]
    argv += ["--endpoint", f"ipc://{tmp_path}/no.sock", "--identity", "pool-0.1", "--arena-bytes", "4096"]
    done = subprocess.run(
        [*argv, "--arena-fd", "0"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--arena-fd 0 is not the gateway's arena" in done.stderr
