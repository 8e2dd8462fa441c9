"""What a worker says of a version, and what it says in place of a message that is too big for a frame. Pure."""

import msgspec

from shared.errors import Code, InternalFault
from shared.generation_messages import Generated, Piece
from shared.messages import BatchDone, Failure, FromWorker, ItemAnswer, ModelLoaded
from workers.loaded import LoadedVersion


def loaded_message(model: int, loaded: LoadedVersion) -> ModelLoaded:
    """That a version is there, under a gateway's number."""
    runner = loaded.runner
    return ModelLoaded(
        model,
        loaded.batch_s,
        loaded.memory_bytes,
        loaded.precision,
        loaded.load_s,
        runner.pads,
        loaded.row_cap,
        loaded.stages_s,
        loaded.estimated_bytes,
        loaded.generation,
        buckets=loaded.buckets,
    )


def in_parts(message: Generated) -> list[Generated]:
    """The same in two messages. A text that is too long by itself, without any log probabilities, fails."""
    pieces = message.pieces
    if len(pieces) > 1:
        middle = len(pieces) // 2
        return [Generated(pieces[:middle]), Generated(pieces[middle:])]
    piece = pieces[0]
    if not piece.tokens:
        return [Generated([Piece(piece.job, failure=Failure(Code.TOO_LARGE, "the text is too long for one answer"))])]
    middle = len(piece.tokens) // 2  # all log probabilities of a long text that beam search has found
    first = Piece(piece.job, piece.text, piece.tokens[:middle])
    return [Generated([first]), Generated([msgspec.structs.replace(piece, text="", tokens=piece.tokens[middle:])])]


def without_outputs(done: BatchDone) -> BatchDone:
    """Each item's answer is a failure."""
    failure = Failure(Code.INTERNAL, InternalFault.TEXT)
    answers = [ItemAnswer(answer.item, failure=failure) for answer in done.answers]
    return BatchDone(done.batch, answers, done.started_s, 0.0, 0.0, 0)


def instead_of(message: FromWorker) -> list[FromWorker]:
    """What to send, in order, in place of what is too big; nothing where there is no other way to say it."""
    match message:
        case Generated():
            return [*in_parts(message)]
        case BatchDone():
            return [without_outputs(message)]
        case _:
            return []
