"""The admin service over a control without processes: real gRPC, a real repository, a real runtime folder.

`Control` has the names of `gateway.model_control.ModelControl`; its orders are applied by `gateway.orders` and written
to the repository's traffic.json, while loading takes no time.
"""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gateway.api.admin import Admin, Behind
from gateway.api.admin_server import RunningAdmin, start_admin
from gateway.figures import VersionFigures
from gateway.orders import Order, Standing, applied
from gateway.state import ModelState, Role, held
from shared.errors import HeadraceError, UnknownModel, UnknownVersion
from shared.messages import MemoryNote, ModelUse
from shared.repository import Meta, Repository
from shared.repository_writer import add_version, change_traffic, now_utc, role_of
from shared.runtime_dir import RuntimeDir
from shared.settings import Settings
from shared.traffic import Traffic
from tests.support.fake_flow import State

_T = TypeVar("_T")
LIMIT_S = 20.0
MODEL = "pipeline: tensor\nbackend: simulated\n"


def repository(root: Path) -> Path:
    """Two models without versions, `m` and `other`."""
    for name in ("m", "other"):
        (root / name).mkdir(parents=True)
        (root / name / "model.yaml").write_text(MODEL)
    return root


def three_versions(root: Path) -> list[str]:
    """Three versions of `m`, the first one current; `other` gets one, too."""
    found = [_added(root, "m", number) for number in range(3)]
    _added(root, "other", 9)
    return found


def _added(root: Path, name: str, number: int) -> str:
    weights = root.parent / "simulated.json"
    weights.write_text(f'{{"a_ms": {number}}}')
    return add_version(root, name, {"simulated.json": weights}, Meta(owner=f"owner {number}")).version


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """For a runtime folder: short enough for a socket below it."""
    with tempfile.TemporaryDirectory(prefix="admin-") as folder:
        yield Path(folder) / "run"


def admin_settings(root: Path, runtime_dir: Path, **admin: object) -> Settings:
    """`admin`: settings of that group."""
    return Settings.model_validate({"repository": root, "runtime_dir": runtime_dir, "admin": admin})


class Control(State):
    """Control and state in one; event loop only."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self.unloaded: set[str] = set()
        self.fail: HeadraceError | None = None
        self.gate: asyncio.Event | None = None
        self.ordered: list[tuple[str, str]] = []
        self.loads: list[str] = []
        self.phases: dict[str, str] = {}
        self.doubt = ""
        """What speaks against every version."""
        self.amiss: dict[str, object] = {}
        """What `standing` says besides the traffic."""
        self.hidden: set[str] = set()
        """Models of the repository that this server does not serve."""

    def names(self) -> list[str]:
        repository = Repository(self._root)
        return [name for name in repository.names() if repository.versions(name) and name not in self.hidden]

    def index(self) -> list[ModelState]:
        return [
            ModelState(
                name=name,
                version=version,
                phase="unloaded" if name in self.unloaded else self.phases.get(version, "ready"),  # type: ignore[arg-type]
                role=_role(self.traffic(name), version),
                doubt=self.doubt,
                memory_bytes=1_000_000,
                load_s=0.5,
                stages_s={"read": 0.2, "build": 0.3},
                precision="fp32",
            )
            for name in self.names()
            for version in self.traffic(name).wanted()
        ]

    async def held(self) -> set[tuple[str, str]]:
        return held(self.index())

    def models(self) -> list[ModelState]:
        return self.index()

    async def load(self, name: str) -> None:
        await self._loading()
        if name not in self.names():
            raise UnknownModel(f"model {name!r} is unknown")
        self.loads.append(name)
        self.unloaded.discard(name)
        self.changed()

    async def unload(self, name: str) -> None:
        await self._loading()
        self.traffic(name)
        self.unloaded.add(name)
        self.changed()

    async def order(self, name: str, order: Order, by: str) -> Traffic:
        self.traffic(name)
        self.ordered.append((name, by))
        await self._loading()
        after = change_traffic(self._root, name, lambda before: self._applied(name, before, order, by))
        self.changed()
        return after

    def _applied(self, name: str, before: Traffic, order: Order, by: str) -> Traffic:
        after = applied(before, order, now_utc(), by, self.doubt)
        for version in after.wanted():
            if version not in Repository(self._root).versions(name):
                raise UnknownVersion(f"model {name!r} has no version {version!r}")
        return after

    def traffic(self, name: str) -> Traffic:
        if name not in self.names():
            raise UnknownModel(f"model {name!r} is not served")
        repository = Repository(self._root)
        found = repository.traffic(name)
        return found if found.current else Traffic(current=repository.current(name))

    def standing(self, name: str) -> Standing:
        return Standing(self.traffic(name), **self.amiss)  # type: ignore[arg-type]  # fields by name

    async def all_figures(self, name: str) -> list[VersionFigures]:
        traffic = self.traffic(name)
        return [
            VersionFigures(
                version=version,
                role=_role(traffic, version),
                requests=100,
                errors=number,
                batches=50,
                slow=2 * number,
                p50_ms=4.5,
                p99_ms=20.25,
            )
            for number, version in enumerate(traffic.wanted())
        ]

    def memory(self) -> list[tuple[str, MemoryNote]]:
        uses = [
            ModelUse(each.name, each.version, 1_000_000, pinned=True, batches=7, rows=9, per_minute=1.5, idle_s=2.0)
            for each in self.index()
        ]
        held = 1_000_000 * len(uses)
        return [("worker-0", MemoryNote(4_000_000, held, 9_000_000, 0, 0, len(uses), 0, uses))]

    async def _loading(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.fail is not None:
            raise self.fail

    def changed(self) -> None:
        for each in self._subscribers:
            each()


def _role(traffic: Traffic, version: str) -> Role:
    return role_of(traffic, version) or "retiring"


class AdminThread:
    """A running admin service, its event loop in a thread of its own; calls come from the test's thread."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.loop = asyncio.new_event_loop()
        self.control = Control(settings.repository)
        self.running: RunningAdmin
        self._thread = threading.Thread(target=self.loop.run_forever, name="admin-loop", daemon=True)

    def do(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run something on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LIMIT_S)

    def call(self, function: Callable[[], object]) -> None:
        """Call something on the loop, and wait until it has been called."""

        async def work() -> None:
            function()

        self.do(work())

    def start(self, socket_path: Path) -> None:
        self._thread.start()
        self.running = self.do(self._start(socket_path))

    async def _start(self, socket_path: Path) -> RunningAdmin:
        servicer = Admin(self.settings, Behind(self.control, self.control, self.control.memory))
        return await start_admin(self.settings, socket_path, servicer)

    def close(self) -> None:
        if hasattr(self, "running"):
            self.do(self.running.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LIMIT_S)
        self.loop.close()


@contextlib.contextmanager
def admin_server(settings: Settings, index: int = 0) -> Iterator[AdminThread]:
    """As a gateway of this number would serve it: inside its lock."""
    runtime = RuntimeDir.open(settings.runtime_dir)
    server = AdminThread(settings)
    try:
        runtime.lock("gateway" if not index else f"gateway-{index}")
        server.start(runtime.admin_socket(index))
        yield server
    finally:
        server.close()
        runtime.close()
