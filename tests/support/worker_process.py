"""A worker process of its own in front of a test's gateways."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shared.messages import BatchDone, LoadModel, ModelLoaded
from tests.support.fake_gateway import LIMIT_S, FakeGateway
from tests.support.worker_parts import toy_model

ROOT = Path(__file__).parents[2]
LOG = "worker.log"
SIMULATED = "pipeline: toy:Toy\nbackend: simulated\n"


class Worker:
    """`python -m workers` in a folder of its own."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process = process
        self.runtime = folder / "run"

    async def exit_code(self) -> int:
        """Once it has ended."""
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()

    def leftovers(self) -> list[Path]:
        """Files of its own in the runtime folder."""
        return list(self.runtime.glob("worker*"))

    def stderr(self) -> str:
        """All of its log so far, and of others in the same folder."""
        return (self.runtime.parent / LOG).read_text()


@asynccontextmanager
async def worker_in(
    folder: Path, *arguments: str, gateways: int = 1, budget_bytes: int | None = None
) -> AsyncIterator[Worker]:
    """A worker that looks for so many gateways in `folder`/run and loads from `folder`/models."""
    budget = "" if budget_bytes is None else f", memory_budget_bytes: {budget_bytes}"
    config = folder / "headrace.yaml"
    config.write_text(
        f"repository: models\nruntime_dir: {folder / 'run'}\nlog: {{format: json}}\n"
        f"worker: {{threads: 1, device: cpu{budget}}}\nbatching: {{max_rows: 4}}\ngateway: {{processes: {gateways}}}\n"
    )
    with (folder / LOG).open("ab") as log:  # not a pipe, which a talkative worker would fill
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers", "--config", str(config), *arguments, cwd=ROOT, stderr=log
        )
    try:
        yield Worker(process, folder)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def simulated(folder: Path, name: str = "sim", a_ms: float = 0.0, memory_bytes: int = 0) -> str:
    """A model in `folder`/models whose batches take so long; its version. One that takes memory loads on demand."""
    timing = json.dumps({"a_ms": a_ms, "b_ms": 0, "memory_bytes": memory_bytes}).encode()
    config = SIMULATED + ("load: on_demand\n" if memory_bytes else "")
    return toy_model(folder / "models", name, config, {"simulated.json": timing}).version


async def load(gateway: FakeGateway, name: str, version: str, model: int = 1) -> ModelLoaded:
    """Load a model and wait until that is done."""
    after = len(gateway.received)
    gateway.send(LoadModel(model, name, version))
    return await gateway.next(ModelLoaded, after)


def codes(done: BatchDone) -> dict[int, str | None]:
    """Item → why it failed, or None."""
    return {answer.item: None if answer.failure is None else answer.failure.code for answer in done.answers}
