"""More models than a worker has memory for, random callers of them, and a witness of what the worker says it holds."""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from bench.processes import role_of
from headrace import AsyncClient, InferenceError
from headrace.admin_client import AdminClient
from headrace.admin_results import WorkerMemory
from shared.repository import Meta
from shared.repository_writer import add_version
from shared.settings_loader import load
from tests.support.stack import Site

MB = 1_000_000
CALL_LIMIT_S = 30.0
CONFIG = """\
pipeline: image_classification
backend: {backend}
load: on_demand
preprocessing: {{size: 32, classes: 1000}}
batching: {{max_rows: 4}}
"""
NET = """\
from torch import nn

def build() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 1000))
"""


def simulated_version(root: Path, name: str, megabytes: float, a_ms: float = 2.0) -> str:
    """A version that says that it takes so much; it becomes current."""
    weights = root / f"{name}.json"
    weights.write_text(json.dumps({"a_ms": a_ms, "b_ms": 0, "memory_bytes": int(megabytes * MB)}))
    added = add_version(root, name, {"simulated.json": weights}, Meta(source="test"), make_current=True, by="test")
    weights.unlink()
    return added.version


def simulated_models(root: Path, sizes: dict[str, float], a_ms: float = 2.0) -> Path:
    """A repository of models that are loaded on demand, by name, and the megabytes that each says it takes."""
    root.mkdir()
    for name, megabytes in sizes.items():
        (root / name).mkdir()
        (root / name / "model.yaml").write_text(CONFIG.format(backend="simulated"))
        simulated_version(root, name, megabytes, a_ms)
    return root


def torch_models(root: Path, names: Sequence[str]) -> Path:
    """The same of torch: each has 3.1 million weights of its own, 12.3 MB."""
    import torch  # noqa: PLC0415 - seconds, and only one test needs it
    from safetensors.torch import save_file  # noqa: PLC0415 - as above

    root.mkdir()
    for number, name in enumerate(names):
        (root / name).mkdir()
        (root / name / "model.yaml").write_text(CONFIG.format(backend="torch") + "network: net:build\n")
        (root / name / "net.py").write_text(NET)
        torch.manual_seed(number)
        file = root / f"{name}.safetensors"
        save_file(torch.nn.Linear(3 * 32 * 32, 1000).state_dict(prefix="1."), file)
        add_version(root, name, {"weights.safetensors": file}, Meta(source="test"), make_current=True, by="test")
        file.unlink()
    return root


def broken_model(root: Path, name: str) -> str:
    """A model of torch whose weights don't fit its network; what the server says of it."""
    import torch  # noqa: PLC0415 - as above
    from safetensors.torch import save_file  # noqa: PLC0415 - as above

    (root / name).mkdir()
    (root / name / "model.yaml").write_text(CONFIG.format(backend="torch") + "network: net:build\n")
    (root / name / "net.py").write_text(NET)
    file = root / f"{name}.safetensors"
    save_file({"1.weight": torch.zeros(1000, 3 * 32 * 32)}, file)
    add_version(root, name, {"weights.safetensors": file}, Meta(source="test"), make_current=True, by="test")
    file.unlink()
    return "1.bias"


def resident_mb(site: Site) -> dict[str, float]:
    """Memory of every process of a server that no other one shares, by what it is and its number."""
    found = {}
    for process in site.processes():
        memory = process.memory_info()
        found[f"{role_of(process.cmdline())} {process.pid}"] = (memory.rss - memory.shared) / 1e6
    return found


class Said(NamedTuple):
    """What became of random calls."""

    outcomes: Counter[str]
    wrong: list[str]
    """Answers that were not what the same model said of the same image before."""


def random_traffic(
    address: str,
    image: bytes,
    models: Sequence[str],
    *,
    calls: int,
    callers: int = 6,
    clients: int = 1,
    attempts: int = 1,
    each: Callable[[int], None] = lambda _done: None,
) -> Said:
    """So many calls of models drawn by chance, each answered before its caller asks again.

    `attempts`: of each call, as long as the server itself asks for another one. `each(done)` is told after every
    call how many have ended.
    """
    said = Said(Counter(), [])
    first: dict[str, int] = {}
    drawn = iter(random.Random(5).choices(list(models), k=calls))  # noqa: S311 - always the same

    async def caller(client: AsyncClient) -> None:
        for name in drawn:
            try:
                best = (await client.classify(image, model=name, timeout_s=CALL_LIMIT_S)).top.index
                said.outcomes["ok"] += 1
                if first.setdefault(name, best) != best:
                    said.wrong.append(name)
            except InferenceError as error:
                said.outcomes[f"{name}: {error}"] += 1
            each(said.outcomes.total())

    async def main() -> None:
        opened = [AsyncClient(address, max_attempts=attempts) for _ in range(clients)]
        try:
            await asyncio.gather(*(caller(opened[number % clients]) for number in range(callers)))
        finally:
            for client in opened:
                await client.close()

    asyncio.run(main())
    return said


class Witness:
    """Reads every change of the workers' memory that the admin service tells of, in a thread."""

    def __init__(self, site: Site) -> None:
        self.seen: list[WorkerMemory] = []
        self._admin = AdminClient.connect(load(site.config).settings)
        self._stream = self._admin.watch()
        self._thread = threading.Thread(target=self._read)
        self._closing = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._admin.close()
        self._thread.join(CALL_LIMIT_S)

    def _read(self) -> None:
        try:
            for change in self._stream:
                self.seen += change.memory
        except Exception:
            if not self._closing:
                raise
