"""The next token of each text of a step: drawn for all lines at once, searched for each beam search by itself."""

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
from workers.generation.sequences import Beams, Line, Said, Text

Chosen = tuple[Text, Tensor]
"""A text, and the logits `[rows, vocabulary]` of its rows."""

_log = get_logger()


def advance(runner: GenerationRunner, texts: Sequence[Chosen]) -> list[Said | Failure]:
    """What each of them says now, in order. Raises DeviceLost."""
    lines = [(text, logits) for text, logits in texts if isinstance(text, Line)]
    choices = dict(zip((id(line) for line, _ in lines), _drawn(runner, lines), strict=True))
    return [_advance(runner, text, logits, choices.get(id(text))) for text, logits in texts]


def _drawn(runner: GenerationRunner, lines: Sequence[tuple[Line, Tensor]]) -> Sequence[Choice | None]:
    """None for those that will have to be drawn alone."""
    if not lines:
        return ()
    try:
        with runner.judged():
            return choose(torch.cat([logits for _, logits in lines]), [line.way() for line, _ in lines])
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - whose it is turns out below
        _log.warning("choosing tokens failed", texts=len(lines), error=f"{type(error).__name__}: {str(error)[:300]}")
        return [None] * len(lines)


def _advance(runner: GenerationRunner, text: Text, logits: Tensor, choice: Choice | None) -> Said | Failure:
    """No network's code but ours: still, what it raises is one text's end and not that of all."""
    try:
        with runner.judged():
            if isinstance(text, Line):
                return text.take(choose(logits, [text.way()])[0] if choice is None else choice)
            return cast("Beams", text).take(logits)
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - answered
        _log.error("a text failed", job=text.job.number, exc_info=error)
        return Failure(Code.INTERNAL, InternalFault.TEXT)
