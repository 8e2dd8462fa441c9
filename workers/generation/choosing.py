"""The next token of each text of a step: drawn for all chains at once, searched for each beam search by itself."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from shared.errors import Code, InternalFault
from shared.logs import get_logger
from shared.messages import Failure
from workers.backends.base import DeviceLost
from workers.generation.runner import GenerationRunner
from workers.generation.sampler import Choice, choose
from workers.generation.sequences import Beams, Chain, Said, Text

Chosen = tuple[Text, Tensor]
"""A text, and the logits `[rows, vocabulary]` of its rows."""

_log = get_logger()


def advance(runner: GenerationRunner, texts: Sequence[Chosen]) -> list[Said | Failure]:
    """What each of them says now, in order. Raises DeviceLost."""
    chains = [(text, logits) for text, logits in texts if isinstance(text, Chain)]
    choices = dict(zip((id(chain) for chain, _ in chains), _drawn(runner, chains), strict=True))
    return [_advance(runner, text, logits, choices.get(id(text))) for text, logits in texts]


def _drawn(runner: GenerationRunner, chains: Sequence[tuple[Chain, Tensor]]) -> Sequence[Choice | None]:
    """None for those that will have to be drawn alone."""
    if not chains:
        return ()
    try:
        with runner.judged():
            return choose(torch.cat([logits for _, logits in chains]), [chain.way() for chain, _ in chains])
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - whose it is turns out below
        _log.warning("choosing tokens failed", texts=len(chains), error=f"{type(error).__name__}: {str(error)[:300]}")
        return [None] * len(chains)


def _advance(runner: GenerationRunner, text: Text, logits: Tensor, choice: Choice | None) -> Said | Failure:
    """No network's code but ours: still, what it raises is one text's end and not that of all."""
    try:
        with runner.judged():
            if isinstance(text, Chain):
                return text.take(choose(logits, [text.way()])[0] if choice is None else choice)
            return cast("Beams", text).take(logits)
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - answered
        _log.error("a text failed", job=text.job.number, exc_info=error)
        return Failure(Code.INTERNAL, InternalFault.TEXT)
