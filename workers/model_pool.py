"""The loaded versions of a worker, and the thread that loads more while the loop answers batches."""

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from shared.errors import Code, HeadraceError, StartupError
from shared.logs import Seldom, get_logger
from shared.messages import Failure
from shared.pipeline import Pipeline
from shared.pipeline_loader import own_code_failed
from workers.backends.base import DeviceLost, NotAsDeclared, Precision, Runner
from workers.precision import OverflowGuard

_log = get_logger()


class Key(NamedTuple):
    """Which version."""

    name: str
    version: str
    revision: str = ""
    """Of model.yaml."""


class LoadedVersion:
    """One version, ready to run. Used by the loop's thread only."""

    def __init__(self, key: Key, runner: Runner, pipeline: Pipeline[Any], batch_s: list[tuple[int, float]]) -> None:
        """`batch_s`: measured (rows, seconds) for each allowed batch size, rising."""
        self.key = key
        self.runner = runner
        self.spec = pipeline.spec
        self.raw = pipeline.passthrough
        """Raw tensors: what is not finite in them is the caller's to judge."""
        self.batch_s = batch_s
        self.load_s = 0.0
        self.precision: Precision = runner.precision
        self.guard = OverflowGuard(self._give_up_fp16)
        self.failed_items, self.failed_batches = Seldom(), Seldom()
        """A network that raises on every row must not fill the log."""
        self.row_cap: int | None = None
        """Rows that fit the device's memory, learned from running out of it; None: no limit met."""

    def padded(self, rows: int) -> int:
        """The smallest allowed batch size that holds `rows`."""
        return next((size for size, _ in self.batch_s if size >= rows), rows)

    def lower_row_cap(self, failed_rows: int) -> None:
        """A batch of `failed_rows` did not fit: no larger ones than half of it from now on.

        Where batches are padded up, no larger ones than the next allowed size down: what would be padded beyond half
        of the rows would not fit either.
        """
        half = max(1, failed_rows // 2)
        if self.runner.pads:
            half = max((size for size, _ in self.batch_s if size <= half), default=half)
        self.row_cap = min(self.row_cap or failed_rows, half)
        _log.warning(
            "the device is out of memory", model=self.key.name, rows=failed_rows, max_rows_from_now=self.row_cap
        )

    def _give_up_fp16(self, rescued: int, rows: int) -> None:
        self.precision = "fp32"
        _log.warning(
            "switched to FP32",
            model=self.key.name,
            version=self.key.version,
            reason=f"{rescued} of {rows} rows overflowed in FP16 and were fine in FP32",
            advice="set `precision: fp32` in this model's model.yaml",
        )

    def __repr__(self) -> str:
        return f"<LoadedVersion {self.key.name}@{self.key.version} {self.precision} cap={self.row_cap}>"


Load = Callable[[Key, bytes], LoadedVersion]


class ModelPool:
    """Loaded versions by key. One thread loads them, in the order asked for; the rest is the loop's."""

    def __init__(self, load: Load) -> None:
        """`load` runs on the pool's own thread, and may raise anything."""
        self._load = load
        self._loaded: dict[Key, LoadedVersion] = {}
        self._pending: set[Key] = set()
        self._dropped: set[Key] = set()
        # Both queues hold at most one entry per version of the repository.
        self._wanted: queue.SimpleQueue[tuple[Key, bytes] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[Key, LoadedVersion | Failure]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._device_lost: DeviceLost | None = None
        # A daemon: a load that hangs in the user's code must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="loader", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Becomes readable when `finished` has something."""
        return self._wake

    def get(self, key: Key) -> LoadedVersion | None:
        """The version, if it is loaded."""
        return self._loaded.get(key)

    def want(self, key: Key, config: bytes = b"") -> None:
        """Load a version unless it is loaded or being loaded; `finished` tells the outcome."""
        self._dropped.discard(key)
        if key not in self._loaded and key not in self._pending:
            self._pending.add(key)
            self._wanted.put((key, config))

    def finished(self) -> list[tuple[Key, LoadedVersion | Failure]]:
        """What has been loaded, or failed to, since the last call. Never blocks. Raises DeviceLost."""
        if self._device_lost is not None:
            raise self._device_lost
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        outcomes = []
        while not self._outcomes.empty():
            key, outcome = self._outcomes.get()
            self._pending.discard(key)
            if key in self._dropped:
                self._dropped.discard(key)
                continue
            if isinstance(outcome, LoadedVersion):
                self._loaded[key] = outcome
            outcomes.append((key, outcome))
        return outcomes

    def drop(self, key: Key) -> None:
        """Forget a version; its memory is free for the next one."""
        if key in self._pending:
            self._dropped.add(key)
        self._loaded.pop(key, None)

    def keep(self, keys: set[Key]) -> None:
        """Forget all versions but these; what of them is not loaded yet has to be asked for."""
        for key in (self._loaded.keys() | self._pending) - keys:
            self.drop(key)

    def close(self, limit_s: float) -> bool:
        """Stop the thread. False when it is still inside a load after `limit_s` seconds."""
        self._closing = True
        self._wanted.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (wanted := self._wanted.get()) is not None and not self._closing:
            self._outcomes.put((wanted[0], self._outcome(*wanted)))
            os.eventfd_write(self._wake, 1)

    def _outcome(self, key: Key, config: bytes) -> LoadedVersion | Failure:
        try:
            return self._load(key, config)
        except StartupError as error:
            code, text, told = Code.NOT_READY, error.text, error.told
        except HeadraceError as error:
            code, text, told = error.code, error.text, error.text
        except NotAsDeclared as error:
            code, text, told = Code.NOT_READY, f"model {key.name}: {error}", str(error)
        except DeviceLost as error:
            self._device_lost = error
            code, text, told = Code.NOT_READY, f"model {key.name}: the device was lost", str(error)
        except Exception as error:  # noqa: BLE001 - the user's network and pipeline run here; callers get its type
            told = str(own_code_failed(f"model {key.name} failed its warm-up", error))
            code, text = Code.NOT_READY, told
        _log.error("model not loaded", model=key.name, version=key.version, reason=told)
        return Failure(code, text)

    def __repr__(self) -> str:
        return f"<ModelPool loaded={[key.name for key in self._loaded]} pending={[key.name for key in self._pending]}>"
