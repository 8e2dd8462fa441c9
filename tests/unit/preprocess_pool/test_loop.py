import os
from collections.abc import Sequence

import pytest

from preprocess_pool import loop
from shared.child import StopSignal
from shared.errors import ExitCode
from shared.messages import (
    Failure,
    Finished,
    FinishJob,
    FromPool,
    JobFailed,
    OpenPipeline,
    PipelineOpened,
    PoolReady,
    Prepared,
    PrepareJob,
    Stop,
    ToPool,
)
from shared.transport import FrameTooBig, PeerLost


class Channel:
    """Hands out messages in order; the answers are in `sent`."""

    def __init__(self, *incoming: ToPool | None, limit: int | None = None, lost_after: int | None = None) -> None:
        self.incoming = list(incoming)
        self.sent: list[FromPool] = []
        self.limit = limit
        self.lost_after = lost_after

    def send(self, message: FromPool) -> None:
        if self.lost_after is not None and len(self.sent) >= self.lost_after:
            raise PeerLost("no room")
        if isinstance(message, Prepared) and self.limit is not None and len(message.context) > self.limit:
            raise FrameTooBig("too big")
        self.sent.append(message)

    def receive(self, timeout_s: float | None, watch: Sequence[int] = ()) -> ToPool | None:
        assert timeout_s is None
        assert len(watch) == 1
        return self.incoming.pop(0)


class Stage:
    """Answers by number."""

    def open(self, message: OpenPipeline) -> PipelineOpened:
        return PipelineOpened(message.model)

    def prepare(self, job: PrepareJob) -> Prepared:
        return Prepared(job.job, [], job.options, 0.0)

    def finish(self, job: FinishJob) -> Finished:
        return Finished(job.job, [])

    def too_big(self, job: PrepareJob | FinishJob) -> JobFailed:
        return JobFailed(job.job, Failure("too_large", ""))


def prepare(job: int, options: bytes = b"") -> PrepareJob:
    return PrepareJob(job, 0.0, 1, "image", b"", options, [])


def finish(job: int) -> FinishJob:
    return FinishJob(job, 0.0, 1, b"", b"", [])


class Cpu:
    """What the limit was set to, in order."""

    def __init__(self) -> None:
        self.limits: list[str] = []

    def job(self) -> None:
        self.limits.append("job")

    def lift(self) -> None:
        self.limits.append("none")


def serve(channel: Channel, cpu: Cpu | None = None) -> int:
    with StopSignal() as stop:
        return loop.serve(channel, Stage(), stop, cpu or Cpu())  # type: ignore[arg-type]  # fakes that share the names


def test_every_message_gets_one_answer_in_order() -> None:
    channel = Channel(OpenPipeline(1, "m", "v"), prepare(1), None, finish(2), prepare(3), Stop(), prepare(4))
    assert serve(channel) == ExitCode.OK
    assert channel.sent == [
        PoolReady(),
        PipelineOpened(1),
        Prepared(1, [], b"", 0.0),
        Finished(2, []),
        Prepared(3, [], b"", 0.0),
    ]
    assert channel.incoming == [prepare(4)]


def test_each_job_gets_cpu_time_of_its_own_and_building_a_pipeline_is_not_limited() -> None:
    cpu = Cpu()
    serve(Channel(prepare(1), OpenPipeline(1, "m", "v"), finish(2), prepare(3), Stop()), cpu)
    assert cpu.limits == ["job", "none", "job", "job"]


def test_an_answer_too_big_for_a_message_becomes_a_failure() -> None:
    channel = Channel(prepare(1, b"longer than allowed"), prepare(2), Stop(), limit=5)
    assert serve(channel) == ExitCode.OK
    assert channel.sent[1:] == [JobFailed(1, Failure("too_large", "")), Prepared(2, [], b"", 0.0)]


@pytest.mark.parametrize("answers", [0, 1])
def test_a_gateway_that_takes_nothing_ends_the_process(answers: int) -> None:
    assert serve(Channel(prepare(1), lost_after=answers)) == ExitCode.PEER_LOST


def test_a_signal_ends_the_loop_after_the_present_job() -> None:
    class Signalled(Channel):
        def receive(self, timeout_s: float | None, watch: Sequence[int] = ()) -> ToPool | None:
            os.kill(os.getpid(), 15)
            return super().receive(timeout_s, watch)

    channel = Signalled(prepare(1), prepare(2))
    assert serve(channel) == ExitCode.OK
    assert len(channel.sent) == 2
