"""The items of a request, each in a task of its own, to one result per input. Event loop only."""

import asyncio
from typing import TypeAlias

from gateway.pieces import at, joined
from shared.errors import HeadraceError
from shared.results import Result

Results: TypeAlias = list[Result | HeadraceError]
Tasks: TypeAlias = "list[asyncio.Task[list[Result]]]"
"""The items of one input, under way."""


def running(tasks: "list[Tasks | HeadraceError]") -> "list[asyncio.Task[list[Result]]]":
    """The tasks of all items."""
    return [task for items in tasks if isinstance(items, list) for task in items]


async def collect(tasks: "list[Tasks | HeadraceError]", *, partial: bool) -> Results:
    """One result per input, in order. Without `partial` the first failure in time ends the request."""
    when = asyncio.ALL_COMPLETED if partial else asyncio.FIRST_EXCEPTION
    await asyncio.wait(running(tasks), return_when=when)
    results: list[Result | HeadraceError] = []
    failures: list[HeadraceError] = []
    for index, items in enumerate(tasks):
        error = items if isinstance(items, HeadraceError) else _failure_of(items)
        if isinstance(error, HeadraceError):
            failures.append(at(index, error) if len(tasks) > 1 else error)
            results.append(failures[-1])
        elif error is not None:
            raise error
        elif isinstance(items, list) and all(item.done() for item in items):
            results.append(joined([item.result() for item in items]))
    if failures and (not partial or len(failures) == len(tasks)):
        raise failures[0]
    return results


def _failure_of(items: "Tasks") -> BaseException | None:
    """The first failure; all are looked at, or asyncio would complain of those that nobody saw."""
    failures = [item.exception() for item in items if item.done()]
    return next((failure for failure in failures if failure is not None), None)
