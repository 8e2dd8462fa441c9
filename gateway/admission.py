"""The door: how much may be in the server at one time. Pure policy of the gateway process.

Admission is a try that never waits and returns a permit the caller owns; leaving the permit's `with` block gives the
room back. Limits are in requests, rows and payload bytes; the first one without room names itself in the refusal.
"""

from types import TracebackType
from typing import NoReturn, Self

from shared.errors import Draining, Overloaded, TooLarge
from shared.settings import AdmissionSettings

RETRY_FLOOR_S = 0.010
RETRY_CEILING_S = 2.0
FIRST_GUESS_S = 0.1
"""Retry delay before any release was measured."""
DRAINING_RETRY_MS = 1000
"""About the time in which a replacement comes up; another server can be asked at once."""
WINDOW_S = 0.1
"""Releases are counted over windows of at least this length."""
NEWEST_WINDOW = 0.3
"""Weight of the newest window when the release rate falls; when it rises, the newest window counts alone, since a quiet
time says nothing about what the server can do."""


class Permit:
    """Room for one request. Give it back once, by `with` or `release()`; a second time does nothing."""

    __slots__ = ("_admission", "nbytes", "rows")

    def __init__(self, admission: "Admission", rows: int, nbytes: int) -> None:
        self._admission: Admission | None = admission
        self.rows = rows
        self.nbytes = nbytes

    def release(self) -> None:
        """Give the room back; idempotent."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._take_back(self.rows, self.nbytes)  # noqa: SLF001 - the two classes are one mechanism

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Amount:
    """One limited quantity: its limit, what is in flight, and how fast it is given back.

    `released` counts since the last window, `rate` is per second, `promised` is what refused callers were told to
    come back for and was not released since.
    """

    __slots__ = ("in_flight", "limit", "promised", "rate", "released", "setting", "word")

    def __init__(self, limit: int, setting: str, word: str) -> None:
        self.limit = limit
        self.setting = setting
        self.word = word
        self.in_flight = 0
        self.released = 0
        self.rate = 0.0
        self.promised = 0.0

    def close_window(self, elapsed_s: float) -> None:
        newest = self.released / elapsed_s
        self.rate = max(newest, self.rate + (newest - self.rate) * NEWEST_WINDOW)
        self.promised = max(0.0, self.promised - self.released)

    def delay_s(self, wanted: int) -> float:
        """How long until there is room: behind all who were refused before, so that they don't come back at once."""
        missing = self.in_flight + wanted - self.limit
        if self.rate * RETRY_CEILING_S <= self.promised + missing:
            return RETRY_CEILING_S
        delay_s = (self.promised + missing) / self.rate
        self.promised += wanted
        return max(delay_s, RETRY_FLOOR_S)


class Admission:
    """Counts what is in flight against `admission.*` and refuses the rest at once. One thread, the gateway's loop."""

    __slots__ = ("_bytes", "_measured", "_open", "_requests", "_rows", "_window_s")

    def __init__(self, limits: AdmissionSettings) -> None:
        self._requests = _Amount(limits.max_requests, "admission.max_requests", "requests")
        self._rows = _Amount(limits.max_rows, "admission.max_rows", "rows")
        self._bytes = _Amount(limits.max_bytes, "admission.max_bytes", "payload bytes")
        self._open = True
        self._measured = False
        self._window_s = float("-inf")

    @property
    def in_flight_requests(self) -> int:
        """Requests in flight."""
        return self._requests.in_flight

    @property
    def in_flight_rows(self) -> int:
        """Rows in flight."""
        return self._rows.in_flight

    @property
    def in_flight_bytes(self) -> int:
        """Payload bytes in flight."""
        return self._bytes.in_flight

    @property
    def is_open(self) -> bool:
        """False once the doors are closed."""
        return self._open

    @property
    def full(self) -> bool:
        """Whether `admit` would refuse the smallest request."""
        requests, rows = self._requests, self._rows
        return not self._open or requests.in_flight >= requests.limit or rows.in_flight >= rows.limit

    def close_doors(self) -> None:
        """From now on every `admit` raises Draining; permits already given stay valid. Idempotent."""
        self._open = False

    def admit(self, rows: int, nbytes: int, now_s: float) -> Permit:
        """Take room for one request of `rows` rows and `nbytes` payload bytes; never waits.

        Raises:
            Draining: the doors are closed.
            TooLarge: the request is over a limit by itself and could never be admitted.
            Overloaded: no room now; `retry_after_ms` says when there should be, from the observed release rate.
        """
        if not self._open:
            raise Draining("the server is stopping and takes no new requests", retry_after_ms=DRAINING_RETRY_MS)
        requests, all_rows, all_bytes = self._requests, self._rows, self._bytes
        if rows > all_rows.limit:
            _refuse_for_good(all_rows, rows)
        if nbytes > all_bytes.limit:
            _refuse_for_good(all_bytes, nbytes)
        if now_s - self._window_s >= WINDOW_S:
            self._close_window(now_s)
        if requests.in_flight >= requests.limit:
            self._refuse(requests, 1)
        if all_rows.in_flight + rows > all_rows.limit:
            self._refuse(all_rows, rows)
        if all_bytes.in_flight + nbytes > all_bytes.limit:
            self._refuse(all_bytes, nbytes)
        requests.in_flight += 1
        all_rows.in_flight += rows
        all_bytes.in_flight += nbytes
        return Permit(self, rows, nbytes)

    def _take_back(self, rows: int, nbytes: int) -> None:
        for amount, given in ((self._requests, 1), (self._rows, rows), (self._bytes, nbytes)):
            amount.in_flight -= given
            amount.released += given

    def _close_window(self, now_s: float) -> None:
        """Fold the releases since the last window into the rates; a time with nothing in flight doesn't count."""
        elapsed_s = now_s - self._window_s
        self._window_s = now_s
        busy = self._requests.in_flight > 0
        self._measured = self._measured or (busy and self._requests.released > 0)
        for amount in (self._requests, self._rows, self._bytes):
            if busy and self._measured:
                amount.close_window(elapsed_s)
            amount.released = 0

    def _refuse(self, amount: _Amount, wanted: int) -> NoReturn:
        delay_s = amount.delay_s(wanted) if self._measured else FIRST_GUESS_S
        raise Overloaded(
            f"the server is at its limit of {amount.limit} {amount.word} at one time ({amount.setting})",
            retry_after_ms=round(delay_s * 1000),
        )

    def __repr__(self) -> str:
        doors = "" if self._open else ", closed"
        return (
            f"<Admission {self.in_flight_requests}/{self._requests.limit} requests, "
            f"{self.in_flight_rows}/{self._rows.limit} rows, {self.in_flight_bytes}/{self._bytes.limit} bytes{doors}>"
        )


def _refuse_for_good(amount: _Amount, wanted: int) -> NoReturn:
    raise TooLarge(f"the request has {wanted} {amount.word}; the limit is {amount.limit} ({amount.setting})")
