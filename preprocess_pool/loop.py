"""One job at a time, one answer each, in the order of arrival."""

from typing import Protocol

from preprocess_pool.confine import CpuLimit
from preprocess_pool.stage import Stage
from shared.child import StopSignal
from shared.errors import ExitCode
from shared.logs import get_logger
from shared.messages import ClosePipeline, FinishJob, FromPool, OpenPipeline, PoolReady, PrepareJob, Stop, ToPool
from shared.transport import FrameTooBig, PeerLost

log = get_logger()


class Channel(Protocol):
    """What the loop needs of `shared.transport.Dealer`."""

    def send(self, message: FromPool) -> None:
        """Queue a message. Raises PeerLost, FrameTooBig."""

    def receive(self, timeout_s: float | None, watch: tuple[int, ...] = ()) -> ToPool | None:
        """The next message; None when a watched descriptor became ready."""


def serve(channel: Channel, stage: Stage, stop: StopSignal, cpu: CpuLimit) -> int:
    """Announce the process and work until Stop or a signal; the present job is always answered. Returns the exit code.

    Waits without limit: when the gateway dies, the kernel kills this process.
    """
    watch = (stop.fileno(),)
    try:
        channel.send(PoolReady())
        while not stop.requested:
            message = channel.receive(None, watch)
            if isinstance(message, Stop):
                break
            if message is not None:
                _answer(channel, stage, message, cpu)
    except PeerLost as error:
        log.warning("the gateway is lost", reason=str(error))
        return ExitCode.PEER_LOST
    return ExitCode.OK


def _answer(
    channel: Channel, stage: Stage, message: OpenPipeline | ClosePipeline | PrepareJob | FinishJob, cpu: CpuLimit
) -> None:
    if isinstance(message, OpenPipeline):
        cpu.lift()
        channel.send(stage.open(message))
        return
    if isinstance(message, ClosePipeline):
        stage.close(message)
        return
    cpu.job()
    answer = stage.prepare(message) if isinstance(message, PrepareJob) else stage.finish(message)
    try:
        channel.send(answer)
    except FrameTooBig:
        channel.send(stage.too_big(message))
