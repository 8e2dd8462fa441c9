"""The thread that loads versions, and gives back the memory of others, while the loop answers batches.

One job after another, in the order asked for. Versions travel in boxes, lists of one: whoever is to be the last to hold
one empties the box, and no other variable keeps it alive meanwhile.
"""

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from shared.errors import Code, HeadraceError, StartupError
from shared.logs import get_logger
from shared.messages import Failure
from shared.pipeline_loader import own_code_failed
from workers.backends.base import DeviceLost, NotAsDeclared
from workers.backends.device_memory import DeviceMemory
from workers.loaded import Key, LoadedVersion
from workers.mailbox import Mailbox
from workers.pace import Pace, step_back

Box: TypeAlias = list[LoadedVersion]
T = TypeVar("T")

_log = get_logger()


class Loads(Protocol):
    """What the thread runs. Both may raise anything."""

    def estimate(self, key: Key, config: bytes) -> int:
        """Bytes that a version will need, as far as its files tell."""

    def load(self, key: Key, config: bytes) -> LoadedVersion:
        """The version, warm and measured."""


class Estimated(NamedTuple):
    """What a version will need."""

    key: Key
    nbytes: int | Failure


class Finished(NamedTuple):
    """A load has ended."""

    key: Key
    outcome: Box | Failure
    process_bytes: int


class GaveBack(NamedTuple):
    """A version is gone."""

    freed_bytes: int
    """By how much the process's memory fell."""
    expected_bytes: int
    process_bytes: int


Outcome: TypeAlias = Estimated | Finished | GaveBack


class LoaderThread:
    """Its methods are for the loop."""

    def __init__(self, loads: Loads, memory: DeviceMemory, pace: Pace) -> None:
        self.pace = pace
        self._loads = loads
        self._memory = memory
        # Both hold at most a few entries per version: one load is asked for at a time.
        self._jobs: queue.SimpleQueue[Callable[[], Outcome] | None] = queue.SimpleQueue()
        self._mail: Mailbox[Outcome] = Mailbox()
        self._closing = False
        self._device_lost: DeviceLost | None = None
        # A daemon: a load that hangs in the user's code must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="loader", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Becomes readable when `outcomes` has something."""
        return self._mail.fileno()

    def estimate(self, key: Key, config: bytes) -> None:
        """Ask what a version will need; Estimated follows."""
        self._jobs.put(lambda: Estimated(key, self._attempt(key, lambda: self._loads.estimate(key, config))))

    def load(self, key: Key, config: bytes) -> None:
        """Load a version; Finished follows."""
        self._jobs.put(lambda: self._load(key, config))

    def give_back(self, key: Key, box: Box, event: str) -> None:
        """Let go of a version, the last one to hold it; GaveBack follows. `event`: what the log calls it."""
        self._jobs.put(lambda: self._give_back(key, box, event))

    def outcomes(self) -> list[Outcome]:
        """What has come about since the last call. Never blocks. Raises DeviceLost."""
        if self._device_lost is not None:
            raise self._device_lost
        return self._mail.taken()

    def close(self, limit_s: float) -> bool:
        """Stop. False when it is still inside a load after `limit_s` seconds."""
        self._closing = True
        self.pace.close()
        self._jobs.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ on the thread

    def _work(self) -> None:
        step_back()
        while (job := self._jobs.get()) is not None and not self._closing:
            try:
                self._mail.put(job())
            except Exception as error:  # noqa: BLE001 - told to the loop
                # What a load raises is its outcome. This is the thread's own: without it nothing is ever loaded again,
                # so the process must end, as it must for a device that can't give memory back.
                _log.exception("the loader failed")
                kind = type(error).__name__
                self._device_lost = self._device_lost or DeviceLost(f"the loader failed ({kind}, see the log)")
                self._mail.ring()

    def _load(self, key: Key, config: bytes) -> Finished:
        outcome = self._attempt(key, lambda: [self._loads.load(key, config)])
        if isinstance(outcome, Failure):
            self._memory.give_back()  # what it had built before it failed
        return Finished(key, outcome, self._memory.used_bytes())

    def _give_back(self, key: Key, box: Box, event: str) -> GaveBack:
        before, expected = self._memory.used_bytes(), box[0].memory_bytes
        box.clear()
        self._memory.give_back()
        after = self._memory.used_bytes()
        freed = before - after
        _log.info(event, model=key.name, version=key.version, measured_bytes=expected, freed_bytes=freed)
        return GaveBack(freed, expected, after)

    def _attempt(self, key: Key, step: Callable[[], T]) -> T | Failure:
        try:
            return step()
        except StartupError as error:
            text, told = _of_version(key, error.text), error.told
            code = Code.NOT_READY
        except HeadraceError as error:
            code, text, told = error.code, error.text, error.text
        except NotAsDeclared as error:
            text = _of_version(key, str(error))
            code, told = Code.NOT_READY, str(error)
        except DeviceLost as error:
            self._device_lost = error
            code, text, told = Code.NOT_READY, f"model {key.name}: the device was lost", str(error)
        except Exception as error:  # noqa: BLE001 - the user's network and pipeline run here; callers get its type
            told = str(own_code_failed(f"model {key.name} version {key.version}: failed its warm-up", error))
            code, text = Code.NOT_READY, told
        _log.error("model not loaded", model=key.name, version=key.version, reason=told)
        return Failure(code, text)

    def __repr__(self) -> str:
        return f"<LoaderThread jobs={self._jobs.qsize()}>"


def _of_version(key: Key, text: str) -> str:
    """A sentence of a model, with the version that it is about: several of them may be on the way."""
    name = f"model {key.name}"
    if key.version in text:
        return text
    return f"{name} version {key.version}: {text.removeprefix(name).removeprefix(':').lstrip()}"
