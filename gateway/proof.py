"""One proof of a version: its example through all processes, and what it means when that does not come back."""

import asyncio
from typing import NamedTuple

from gateway.flow import Flow
from gateway.generation_lobby import Lobby
from gateway.request import PROOF_PRIORITY, StageTimes
from gateway.served import ServedModel, Terms
from gateway.worker_client import WorkerClient
from shared.board import ELSEWHERE
from shared.clock import now_s
from shared.errors import DeadlineExceeded, HeadraceError, InternalFault
from shared.logs import get_logger

log = get_logger()

PROVE_LIMIT_S = 30.0  # a cold first batch on a slow CPU takes seconds; a hung one is ended by worker.hang_limit_ms


class Proof(NamedTuple):
    """How one ended."""

    failure: str | None
    """None: the answer came back."""
    is_late: bool = False
    """It did not come back in time, which of a busy worker says nothing."""


async def prove(flow: Flow, model: ServedModel) -> Proof:
    """Run the pipeline's example through all processes."""
    deadline_s = now_s() + PROVE_LIMIT_S
    try:
        async with asyncio.timeout_at(deadline_s):
            # Of a text two tokens: the prompt's step, and one that follows.
            options = model.pipeline.parse_options({"max_tokens": 2} if model.pipeline.generates else {})
            terms = Terms(deadline_s, PROOF_PRIORITY, reuse=False)  # through the pool, too
            times = StageTimes()
            await flow.item(model, model.pipeline.example(), options, terms, times)
            model.state.doubt = NOT_FINITE if times.nonfinite_rows else ""
    except InternalFault:
        return Proof("its example failed with an internal error, see the log")
    except (TimeoutError, DeadlineExceeded):
        return Proof("a batch of its example did not come back", is_late=True)
    except HeadraceError as error:
        return Proof(error.text)
    except Exception:
        log.exception("proof failed", model=model.name)
        return Proof("its example could not be run, see the log")
    return Proof(None)


class AtTexts:
    """Whether workers are at texts of a version, so that a proof of it would wait with them, or behind them.

    One that only seems to be is ended by `gateway.generation_hangs`, and its loss is what readiness then sees.
    """

    def __init__(self, workers: WorkerClient, lobby: Lobby) -> None:
        self._workers = workers
        self._lobby = lobby

    def has_texts(self, model: ServedModel) -> bool:
        """A worker has a text of ours."""
        version = self._lobby.versions.get(model.number)
        running = version.places.running() if version is not None else []
        return any(ticket.priority != PROOF_PRIORITY for ticket in running)

    def has_stepped(self, model: ServedModel, since_s: float) -> bool:
        """A worker that has it has said since then that it is at a step: of ours, or of another gateway's texts."""
        if not model.pipeline.generates:
            return False
        records = [worker.doing() for worker in self._workers.with_model(model.number)]
        return any(doing is not None and doing.batch == ELSEWHERE and doing.since_s > since_s for doing in records)


NOT_FINITE = "the proof's example (of pipeline `tensor`: zeros) was answered with NaN or infinity"
"""Of raw tensors, which are passed on as they are; a task that answers so fails its proof."""
