import msgspec
import numpy as np
import pytest

from shared.errors import Code
from shared.generation import GenerationOptions
from shared.generation_messages import Generate, Piece
from shared.messages import Failure
from shared.results import FinishReason, TextEnd
from workers.jobs import Inbox, read
from workers.loaded import Key

KEY = Key("texts", "0" * 16)


def generate(job: int, prompt: bytes = b"", options: bytes | None = None) -> Generate:
    packed = msgspec.msgpack.encode(GenerationOptions(seed=2**64 - 1)) if options is None else options
    return Generate(job, 1, 5.0, prompt, packed)


def test_a_message_becomes_a_job() -> None:
    job = read(generate(7, np.array([1, 65000, 3], "<i4").tobytes()), "me")
    assert (job.owner, job.number, job.deadline_s, job.prompt) == ("me", 7, 5.0, [1, 65000, 3])
    assert job.options == GenerationOptions(seed=2**64 - 1)


@pytest.mark.parametrize(("prompt", "options"), [(b"abc", None), (b"", b"\xc1"), (b"", b"\x81\xa5beams\xcd\x01\x00")])
def test_what_is_no_prompt_or_no_options_is_a_value_error(prompt: bytes, options: bytes | None) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read(generate(1, prompt, options), "me")


def test_only_what_is_open_can_be_cancelled_and_nothing_is_remembered_for_ever() -> None:
    inbox = Inbox()
    for job in (1, 2, 3):
        inbox.add(KEY, generate(job))
    assert inbox.keys() == {KEY}
    inbox.cancel([2, 99])
    new, cancelled = inbox.take()
    assert [message.job for _, message in new] == [1, 2, 3]
    assert cancelled == [2]
    assert inbox.keys() == set()
    assert inbox.take() == ([], [])
    inbox.ended(
        [Piece(1, "a"), Piece(2, failure=Failure(Code.CANCELLED, "")), Piece(3, end=TextEnd(FinishReason.LENGTH, 1, 1))]
    )
    inbox.cancel([1, 2, 3])
    assert inbox.take() == ([], [1])
    assert len(inbox) == 1
