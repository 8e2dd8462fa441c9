"""What any child says to the supervisor, over a pipe that it has inherited; see `shared.messages`."""

from typing import TypeAlias

from shared.model_messages import Message


class ProcessReady(Message, tag="process_ready"):
    """The process does its work now; `detail` is one line for people (e.g. the listening addresses)."""

    process: str
    detail: str


class ProcessFailed(Message, tag="process_failed"):
    """The process can't start or must stop; it exits with `exit_code` next."""

    process: str
    exit_code: int
    text: str


ToSupervisor: TypeAlias = ProcessReady | ProcessFailed
