import asyncio
from typing import Any

import pytest

from gateway.generation import Ticket
from gateway.generation_job import (
    Job,
    context_of,
    generation_options,
    is_repeatable,
    may_have_been,
    prompt_of,
    token_count,
)
from gateway.request import DEFAULT_PRIORITY
from gateway.served import Terms
from shared.board import ELSEWHERE, IDLE, Doing
from shared.errors import InvalidInput, ProcessLost
from shared.generation import GenerationOptions
from shared.generation_messages import Piece
from shared.messages import Failure
from shared.pipeline import Options
from shared.results import FinishReason, TextEnd, Token
from shared.tensors import SlotRef, Tensor
from tests.support.gateway_parts import served
from tests.support.generation_players import CONTEXT, text_model

END = TextEnd(FinishReason.LENGTH, 2, 3)


def job() -> Job:
    left: list[Job] = []
    return Job(
        Ticket(1, 1, 8, DEFAULT_PRIORITY, 10.0),
        text_model(),
        GenerationOptions(),
        Terms(10.0, DEFAULT_PRIORITY),
        left.append,
    )


async def test_pieces_come_as_they_are_read() -> None:
    made = job()
    made.grow(Piece(1, "a"))
    assert (await made.more()).text == "a"
    waiting = asyncio.ensure_future(made.more())
    await asyncio.sleep(0)
    made.grow(Piece(1, "b", [], END))
    assert await waiting == Piece(1, "b", [], END)
    assert made.ended


async def test_what_was_not_read_is_one_piece() -> None:
    made = job()
    tokens = [Token(number, b"x", -1.0) for number in range(3)]
    for number, token in enumerate(tokens):
        made.grow(Piece(1, "abc"[number], [token], END if number == 2 else None))
    assert await made.more() == Piece(1, "abc", tokens, END)


async def test_what_came_before_a_failure_is_read_before_it() -> None:
    made = job()
    made.grow(Piece(1, "a"))
    made.grow(Piece(1, failure=Failure("invalid_input", "no")))
    made.fail(ProcessLost("later"))  # the first reason counts
    assert (await made.more()).text == "a"
    with pytest.raises(InvalidInput, match="no"):
        await made.more()


def test_a_prompt_is_copied_out_of_the_arena_or_the_message() -> None:
    inline = Tensor("tokens", "INT32", (1, 2), b"\1\0\0\0\2\0\0\0")
    assert prompt_of([inline], memoryview(b"")) == b"\1\0\0\0\2\0\0\0"
    arena = memoryview(b"....\3\0\0\0....")
    assert prompt_of([Tensor("tokens", "INT32", (1, 1), SlotRef(4, 4))], arena) == b"\3\0\0\0"
    assert token_count(b"\1\0\0\0\2\0\0\0") == 2


def test_a_pipeline_that_generates_has_the_options_and_a_context() -> None:
    assert context_of(text_model()) == CONTEXT
    with pytest.raises(TypeError, match="has a `context`"):
        context_of(served())
    with pytest.raises(TypeError, match="has GenerationOptions"):
        generation_options(Options())


@pytest.mark.parametrize(
    ("options", "repeatable"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "seed": 0}, True),
        ({"beams": 3}, True),
    ],
)
def test_drawn_texts_are_the_same_only_with_a_seed(options: dict[str, Any], repeatable: bool) -> None:
    assert is_repeatable(options) is repeatable


def test_a_text_may_have_ended_a_worker_that_was_at_no_batch() -> None:
    assert may_have_been(None)
    assert may_have_been(Doing(ELSEWHERE, 1.0))
    assert not may_have_been(Doing(IDLE, 1.0))
    assert not may_have_been(Doing(7, 1.0))
