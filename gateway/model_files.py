"""What the repository says of a model's traffic and configuration, read and written beside the event loop."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from gateway.unwritten import ChangedMeanwhile, Unwritten, same
from shared.clock import now_s
from shared.errors import HeadraceError, NotReady, StartupError, UnknownVersion
from shared.logs import get_logger
from shared.model_config import RepositoryError, config_bytes
from shared.repository import Repository
from shared.repository_files import reason_of
from shared.repository_writer import change_traffic
from shared.traffic import Traffic
from shared.traffic_repair import DAMAGED_FILE, set_aside

log = get_logger()

T = TypeVar("T")


class InForce(NamedTuple):
    """What a model is served by."""

    traffic: Traffic
    config: bytes
    """model.yaml."""


class _Seen(NamedTuple):
    """What is to be written, and in place of what."""

    unwritten: Unwritten
    base: Traffic


class ModelFiles:
    """Every call that touches the disk is a thread's, since a disk may hang. Event loop only."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unwritten: dict[str, Unwritten] = {}
        self._writing: dict[str, asyncio.Task[None]] = {}
        self.changed: Callable[[str], None] = lambda _name: None
        """Told of a model's name when it has changed whether, or why, its traffic is not written."""

    async def wanted(self, name: str, loaded: Collection[str] = ()) -> InForce:
        """What the disk says now, or is to say. Raises UnknownModel, UnknownVersion, NotReady.

        `loaded`: versions that are in memory, whose files may be gone.
        """
        seen = self._seen(name)
        found = await _in_thread(f"model {name[:100]!r} can't be loaded: ", lambda: self._read(name, loaded))
        self._overtaken(name, seen, found.traffic)
        unwritten = self._unwritten.get(name)
        return found if unwritten is None else found._replace(traffic=unwritten.over(found.traffic))

    async def before(self, name: str, in_force: Traffic, limit_s: float | None = None) -> Traffic:
        """What an order changes: what the disk says, or is to say; what is in force, where it says nothing of use.

        `limit_s`: how long it may take to say so.
        """
        with suppress(HeadraceError, TimeoutError):
            seen = self._seen(name)
            async with asyncio.timeout(limit_s):
                disk = await _in_thread("", lambda: self._usable(name, None, in_force))
            if disk is not in_force:  # else it is not what the disk says
                self._overtaken(name, seen, disk)
            unwritten = self._unwritten.get(name)
            return disk if unwritten is None else unwritten.over(disk)
        return in_force

    async def check_there(self, name: str, versions: Iterable[str]) -> None:
        """Raises UnknownVersion for what is not in the repository."""
        there = await _in_thread("", lambda: Repository(self._root, only=name).versions(name))
        for version in versions:
            if version not in there:
                raise UnknownVersion(f"model {name[:100]!r} has no version {version[:100]!r}")

    async def write(
        self, name: str, before: Traffic, change: Callable[[Traffic], Traffic], in_force: Traffic
    ) -> Traffic:
        """Change traffic.json.

        Raises Conflict when it is not as `before` any more, what `change` raises, NotReady when the disk refuses.
        """
        unwritten = self._unwritten.get(name)

        def changed(disk: Traffic) -> Traffic:
            now = self._usable(name, disk, in_force)
            now = now if unwritten is None else unwritten.over(now)
            if not same(now, before):
                raise ChangedMeanwhile(
                    f"the traffic of model {name[:100]!r} was changed by somebody else meanwhile; try again"
                )
            return change(now)

        after = await _in_thread("", lambda: self._change(name, changed))
        if unwritten is not None:  # it was written with this
            self._settle(name, unwritten)
        return after

    # ------------------------------------------------------------ in force first, then written

    def keep(self, name: str, before: Traffic, after: Traffic, changes: int = 1) -> None:
        """This is in force from now on in place of `before`, by so many changes, and is to be written."""
        earlier = self._unwritten.get(name)
        first = Unwritten(before, before, []) if earlier is None else earlier
        self._unwritten[name] = first.followed_by(after, changes)

    def kept(self) -> dict[str, Traffic]:
        """What is in force and not written, by model, with the changes that are not written as its history."""
        return {
            name: msgspec.structs.replace(each.after, history=each.entries) for name, each in self._unwritten.items()
        }

    def unwritten(self, name: str) -> str:
        """Why what is in force is not written yet: one sentence; empty when it is."""
        unwritten = self._unwritten.get(name)
        return "" if unwritten is None else unwritten.reason or "the disk has not answered yet"

    def due(self) -> list[str]:
        """Models whose traffic is to be tried again to be written."""
        now = now_s()
        return [name for name, each in self._unwritten.items() if now >= each.again_s and name not in self._writing]

    async def write_kept(self, name: str, limit_s: float | None = None) -> None:
        """Try to write what is in force. `limit_s`: how long that is waited for; it goes on.

        Raises ChangedMeanwhile when somebody has written something newer, which is to be served then.
        """
        task = self._writing.get(name)
        if task is None:
            task = self._writing[name] = asyncio.get_running_loop().create_task(self._write_kept(name))
            task.add_done_callback(lambda done: self._tried(name, done))
        done, _ = await asyncio.wait((task,), timeout=limit_s)
        if done:
            task.result()
        self.changed(name)

    def _tried(self, name: str, task: "asyncio.Task[None]") -> None:
        del self._writing[name]
        if not task.cancelled():
            task.exception()  # asked for here, since whoever waited may have left

    async def _write_kept(self, name: str) -> None:
        """Until it, and what comes meanwhile, is written, or the disk has refused."""
        while (unwritten := self._unwritten.get(name)) is not None:
            try:
                await self._write_one(name, unwritten)
            except ChangedMeanwhile:
                log.warning("what is in force gives way to what was written meanwhile", model=name)
                self._unwritten.pop(name, None)
                raise
            except HeadraceError as error:
                unwritten.failed(error.text)
                log.error("in force, not yet written", model=name, reason=error.text)  # noqa: TRY400 - foreseen
            except Exception:  # a bug must not keep it from being tried again
                unwritten.failed("the server failed to write it, see the log")
                log.exception("in force, not yet written", model=name)
            if self._unwritten.get(name) is unwritten:
                return

    async def _write_one(self, name: str, unwritten: Unwritten) -> None:
        def changed(disk: Traffic) -> Traffic:
            return unwritten.written(self._usable(name, disk, unwritten.after))

        await _in_thread("", lambda: self._change(name, changed))
        self._settle(name, unwritten)

    def _settle(self, name: str, written: Unwritten) -> None:
        """It is written; what has followed it is not."""
        present = self._unwritten.get(name)
        if present is written:
            del self._unwritten[name]
            if written.reason:
                log.info("written at last", model=name)
            self.changed(name)
        elif present is not None:
            present.lands(written)

    def _seen(self, name: str) -> _Seen | None:
        """What is to be written while a look at the disk begins; None: nothing, or it is being written."""
        unwritten = self._unwritten.get(name)
        return None if unwritten is None or name in self._writing else _Seen(unwritten, unwritten.base)

    def _overtaken(self, name: str, seen: _Seen | None, disk: Traffic) -> None:
        """The disk says this: what was to be written since before the look gives way to what is newer."""
        if seen is None or seen.unwritten.stands_on(disk) or self._seen(name) != seen:
            return
        log.info("written by another gateway, or overtaken by what is newer", model=name)
        del self._unwritten[name]
        self.changed(name)

    # ------------------------------------------------------------ in threads

    def _read(self, name: str, loaded: Collection[str]) -> InForce:
        repository = Repository(self._root, only=name)
        stored = repository.versions(name)
        traffic = repository.traffic(name)
        if not traffic.current:
            traffic = Traffic(current=repository.current(name))
        if traffic.current not in stored and traffic.current not in loaded:
            repository.current(name)  # which says so
        return InForce(traffic, config_bytes(self._root / name))

    def _usable(self, name: str, disk: Traffic | None, in_force: Traffic) -> Traffic:
        """What the disk says (None: it is to be read), or what is in force if that names no version that there is."""
        repository = Repository(self._root, only=name)
        stored = repository.versions(name)
        found = repository.traffic(name) if disk is None else disk
        if not found.current and len(stored) == 1:
            found = Traffic(current=stored[0])
        return found if found.current in {*stored, in_force.current} else in_force

    def _change(self, name: str, change: Callable[[Traffic], Traffic]) -> Traffic:
        try:
            return change_traffic(self._root, name, change)
        except RepositoryError:
            if not set_aside(self._root, name):
                raise
        log.warning("traffic.json was damaged: it is written anew", model=name, kept_as=DAMAGED_FILE)
        return change_traffic(self._root, name, change)


async def _in_thread(prefix: str, work: Callable[[], T]) -> T:
    """Raises what it raises, NotReady with this prefix for what is wrong with the files."""
    try:
        return await asyncio.to_thread(work)
    except StartupError as error:
        raise NotReady(prefix + error.text) from error
    except OSError as error:
        raise NotReady(f"{prefix}the repository can't be used: {reason_of(error)}") from error
