"""What one of several gateways gets of the limits that are of all together. Used by each gateway, for itself.

Requests, rows and bytes are divided evenly and rounded down, so that together they never admit more than was set; the
arena is divided likewise (each share is then rounded up to a power of two, as the whole would be). Pool processes are
dealt out one by one, and each gateway has at least one. `shared.settings` has checked that a share can still hold one
batch, one request and one message.
"""

import os

from shared.settings import Settings


def share_of(settings: Settings, index: int) -> Settings:
    """The settings of gateway number `index`; with one gateway the same ones."""
    count = settings.gateway.processes
    if count == 1:
        return settings
    admission, arena = settings.admission, settings.arena
    return settings.model_copy(
        update={
            "admission": admission.model_copy(
                update={
                    "max_requests": admission.max_requests // count,
                    "max_rows": admission.max_rows // count,
                    "max_bytes": admission.max_bytes // count,
                }
            ),
            "arena": arena.model_copy(update={"budget_bytes": arena.budget_bytes // count}),
            "pool": settings.pool.model_copy(update={"processes": _pool(settings, index)}),
        }
    )


def _pool(settings: Settings, index: int) -> int:
    count = settings.gateway.processes
    each, rest = divmod(settings.pool.processes or os.cpu_count() or 1, count)
    return max(1, each + (index < rest))
