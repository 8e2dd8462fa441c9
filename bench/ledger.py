"""The ledger of a run: what the callers saw against what the server counted, by reason. Used by benchmarks and tests.

A call ends in one word. The server's words are `ok` and those of `shared.errors.Code`; the caller has three of its own,
for when it got no word of the server's. The two sides agree, word by word, but for calls whose caller gave up: such a
call was noticed by the server as left, or had crossed with the server's answer, or had never arrived. A ledger closes
when nothing else differs.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from shared.errors import Code

OK = "ok"
EXPIRED = "expired"
"""The caller's own deadline fired: DEADLINE_EXCEEDED without a reason of the server's."""
LEFT = "left"
"""The caller cancelled its call."""
UNREACHABLE = "unreachable"
"""The connection was lost or refused: UNAVAILABLE without a reason of the server's."""
GIVEN_UP = (EXPIRED, LEFT, UNREACHABLE)

NOTICED = (Code.DEADLINE_EXCEEDED.value, Code.CANCELLED.value)
"""How the server counts a call whose caller has gone. It also answers with the first of them."""


class Ledger(NamedTuple):
    """Both sides of one run. They may differ by what the callers gave up, and by nothing else."""

    calls: int
    """That the callers made."""
    given_up: int
    """Of these, ended by the caller itself."""
    noticed: int
    """Of these, calls that the server counted as left or too late."""
    mistaken: int
    """Of the noticed, expired calls that the server took for left ones: a call's end can overtake its beginning, which
    waits to be read, and then it comes before the server's own clock says that the time is over."""
    crossed: int
    """Of these, calls that the server had answered or refused when the caller gave up: counted by what it said."""
    never_arrived: int
    """Of these, calls of which the server never heard: they expired on the caller's side."""
    faults: tuple[str, ...]
    """Everything that can't be: empty when the ledger closes."""

    def __str__(self) -> str:
        differences = (
            f"{self.calls} calls, {self.given_up} given up: noticed {self.noticed} (mistaken {self.mistaken}), "
            f"crossed {self.crossed}, never arrived {self.never_arrived}"
        )
        return "; ".join((differences, *self.faults))


def word(status: str, reason: str) -> str:
    """A call's end as the caller saw it: the status's name, and the `error-reason` trailer (empty without one)."""
    if status == "OK":
        return OK
    own = {"DEADLINE_EXCEEDED": EXPIRED, "CANCELLED": LEFT, "UNAVAILABLE": UNREACHABLE}
    return reason or own.get(status, status.lower())


def compare(callers: Mapping[str, int], server: Mapping[str, int]) -> Ledger:
    """Callers' words against `server_calls` of the same run."""
    given_up = sum(callers.get(name, 0) for name in GIVEN_UP)
    told = {name: count for name, count in callers.items() if name not in GIVEN_UP}
    faults = []
    crossed = 0
    for name in sorted({*told, *server} - set(NOTICED)):
        more = server.get(name, 0) - told.get(name, 0)
        crossed += more
        if more < 0:
            faults.append(f"callers were told {name} {-more} times more often than the server counted")
    noticed = sum(server.get(name, 0) - told.get(name, 0) for name in NOTICED)
    never_arrived = given_up - crossed - noticed
    if noticed < 0:
        faults.append(f"callers were told {NOTICED[0]} {-noticed} times more often than the server counted")
    if never_arrived < 0:
        faults.append(f"the server counted {-never_arrived} calls that nobody made")
    gone = callers.get(LEFT, 0) + callers.get(UNREACHABLE, 0)
    mistaken = max(0, server.get(Code.CANCELLED, 0) - told.get(Code.CANCELLED, 0) - gone)
    return Ledger(sum(callers.values()), given_up, noticed, mistaken, crossed, never_arrived, tuple(faults))


def server_calls(metrics: str, *methods: str) -> Counter[str]:
    """Ends of calls by reason, from the text of `/metrics`; of all methods unless some are named."""
    return _by_label(metrics, "headrace_calls_total", "reason", "method", methods)


def server_requests(metrics: str, *models: str) -> Counter[str]:
    """Requests by outcome, as counted behind the edge; of all models unless some are named."""
    return _by_label(metrics, "headrace_requests_total", "outcome", "model", models)


def server_drops(metrics: str, point: str) -> Counter[str]:
    """Items dropped at one of the four points, by reason."""
    return _by_label(metrics, "headrace_dropped_total", "reason", "point", (point,))


def server_rows(metrics: str) -> tuple[int, int]:
    """Rows computed, and of these rows for nobody."""
    both = ("headrace_rows_total", "headrace_rows_for_nobody_total")
    rows, nobody = (sum(_by_label(metrics, name, "model", "model", ()).values()) for name in both)
    return rows, nobody


def since(before: Mapping[str, int], after: Mapping[str, int]) -> Counter[str]:
    """What was counted between two looks at one process's counters."""
    return Counter({name: more for name, count in after.items() if (more := count - before.get(name, 0))})


def _by_label(metrics: str, name: str, by: str, only: str, values: tuple[str, ...]) -> Counter[str]:
    """Sums of a counter's samples by one label, where another one has one of `values` (any, when there are none)."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == name and (not values or sample.labels[only] in values) and sample.value:
                found[sample.labels[by]] += round(sample.value)
    return found
