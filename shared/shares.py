"""What one of several gateways gets of the limits that are of all together. Used by each gateway, for itself.

Requests, rows and bytes are divided evenly and rounded down, so that together they never admit more than was set;
caches and the arena are divided likewise (each share of the arena is then rounded up to a power of two, as the whole
would be). Pool processes are dealt out one by one, and each gateway has at least one. `shared.settings` has checked
that a share can still hold one batch, one request and one message.
"""

import os

from shared.settings import Settings


def share_of(settings: Settings, index: int) -> Settings:
    """The settings of gateway number `index`; with one gateway the same ones."""
    count = settings.gateway.processes
    if count == 1:
        return settings
    admission, arena, cache = settings.admission, settings.arena, settings.cache
    return settings.model_copy(
        update={
            "admission": admission.model_copy(
                update={
                    "max_requests": admission.max_requests // count,
                    "max_rows": admission.max_rows // count,
                    "max_bytes": admission.max_bytes // count,
                }
            ),
            "cache": cache.model_copy(
                update={
                    "results_budget_bytes": cache.results_budget_bytes // count,
                    "prepared_budget_bytes": cache.prepared_budget_bytes // count,
                }
            ),
            "arena": arena.model_copy(update={"budget_bytes": arena.budget_bytes // count}),
            "pool": settings.pool.model_copy(update={"processes": _pool(settings, index)}),
        }
    )


def more_pool_processes(settings: Settings) -> str | None:
    """A sentence when the gateways have more pool processes together than were asked for; used by the supervisor."""
    asked, count = _asked(settings), settings.gateway.processes
    if asked >= count:
        return None
    wanted = "pool.processes" if settings.pool.processes else "pool.processes: one per CPU core"
    return (
        f"{count} pool processes, one for each of gateway.processes, though {wanted} is {asked}: no gateway can share"
    )


def _pool(settings: Settings, index: int) -> int:
    each, rest = divmod(_asked(settings), settings.gateway.processes)
    return max(1, each + (index < rest))


def _asked(settings: Settings) -> int:
    return settings.pool.processes or os.cpu_count() or 1
