"""The texts of one version, token by token: between two steps some join and some leave.

    who has left or is late → who can join → a token for all that run → part of the prompts → rows close up

In the state the rows of those that run come first, then those whose prompts are being read, in the order in which they
came.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import cast

from shared.clock import Clock
from shared.errors import Code, InternalFault
from shared.generation_messages import Piece
from shared.logs import get_logger
from shared.messages import Failure
from workers.backends.base import DeviceLost, OutOfMemory
from workers.generation.capacity import portions
from workers.generation.choosing import Chosen, advance
from workers.generation.isolation import NO_MEMORY, Isolation
from workers.generation.line import Line
from workers.generation.runner import Feed, GenerationRunner
from workers.generation.sequences import Said, Text, text_of
from workers.jobs import Job, Refused
from workers.loaded import LoadedVersion

PORTION_S = 0.1
"""About so long a step reads prompts: the texts that run stand still meanwhile, and so do other models."""
LEAST_PORTION, LARGEST_PORTION = 16, 4096
"""Tokens, whatever was measured."""

_log = get_logger()


class Stepper:
    """One per version that has something to do."""

    def __init__(self, loaded: LoadedVersion, runner: GenerationRunner, clock: Clock) -> None:
        self.loaded = loaded
        self._runner = runner
        self._clock = clock
        self._isolation = Isolation(loaded, runner, clock)
        self._waiting = Line()
        self._reading: list[Text] = []
        self._running: list[Text] = []
        self._cancelled: set[tuple[Hashable, int]] = set()
        self._shortest = False  # whose turn it was among the prompts that are read
        self._rows = 0
        """Of the state, that hold something."""
        self._pieces: dict[Hashable, list[Piece]] = {}
        limits = runner.limits
        portion = int(PORTION_S / limits.prefill_s_per_token) if limits.prefill_s_per_token > 0 else LARGEST_PORTION
        self._portion = min(LARGEST_PORTION, max(LEAST_PORTION, portion))

    def __len__(self) -> int:
        """Texts that are not at their end."""
        return len(self._waiting) + len(self._reading) + len(self._running)

    def add(self, job: Job) -> None:
        """Begin a job as soon as there is room. Raises Refused."""
        reader, capacity = self._runner.reader, self._runner.capacity
        if not 0 < len(job.prompt) < reader.context:
            most = reader.context - 1
            raise Refused(Code.INVALID_INPUT, f"the prompt has {len(job.prompt)} tokens; this model takes 1..{most}")
        if not all(0 <= token < reader.vocabulary_size for token in job.prompt):
            raise Refused(Code.INVALID_INPUT, f"a token of the prompt is none of the model's {reader.vocabulary_size}")
        text = text_of(job, reader)
        if not capacity.holds(text.width, text.reserved):
            raise Refused(
                Code.TOO_LARGE,
                f"{text.width} beam(s) of {text.reserved} tokens (prompt and options.max_tokens) are more than this "
                f"model keeps at a time: {capacity.sequences} sequences, {capacity.tokens} tokens together "
                "(`generation` in model.yaml)",
            )
        self._waiting.add(text)

    def cancel(self, owner: Hashable, jobs: Sequence[int]) -> None:
        """Their callers have left: they end with the next step. Those that have ended are nothing to remember."""
        self._cancelled.update((owner, job) for job in jobs)

    def forget(self, owner: Hashable) -> dict[Hashable, list[Piece]]:
        """There is nobody any more to tell; what others are to be told. Raises DeviceLost."""
        self._keep(lambda text: text.job.owner != owner)
        return self._said()

    def end_all(self, failure: Failure) -> dict[Hashable, list[Piece]]:
        """The last pieces of all that is not at its end."""
        for text in self._texts():
            self._fail(text, failure)
        self._keep(lambda _: False)
        return self._said()

    def step(self) -> dict[Hashable, list[Piece]]:
        """One step; what is to be said, by owner. Raises DeviceLost."""
        self._let_leave()
        self._let_join()
        self._decode()
        self._read()
        self._close_up()
        return self._said()

    @property
    def rows(self) -> int:
        """Rows that the last step has left."""
        return self._rows

    # ------------------------------------------------------------ who is there

    def _texts(self) -> list[Text]:
        return [*self._running, *self._reading, *self._waiting]

    def _keep(self, wanted: Callable[[Text], bool]) -> None:
        self._running = list(filter(wanted, self._running))
        self._reading = list(filter(wanted, self._reading))
        self._waiting.keep(wanted)
        self._close_up()

    def _let_leave(self) -> None:
        now_s = self._clock()
        leaving: set[int] = set()
        for text in self._texts():
            if (text.job.owner, text.job.number) in self._cancelled:
                self._fail(text, Failure(Code.CANCELLED, "the caller has left"))
            elif text.job.deadline_s <= now_s:
                self._fail(text, Failure(Code.DEADLINE_EXCEEDED, "the deadline passed before the text was complete"))
            else:
                continue
            leaving.add(id(text))
        self._cancelled.clear()
        if leaving:
            self._keep(lambda text: id(text) not in leaving)

    def _let_join(self) -> None:
        """The owner with the fewest rows first. Who is next and finds no room is not overtaken."""
        present = [*self._running, *self._reading]
        while (text := self._waiting.next(present)) is not None:
            rows = sum(each.width for each in [*present, text])
            longest = max(each.reserved for each in [*present, text])
            cap = self._loaded_cap()
            if present and (not self._runner.capacity.holds(rows, longest) or rows > cap):
                return
            try:
                self._runner.make_room(rows, longest)
            except DeviceLost:
                raise
            except Exception as error:  # noqa: BLE001 - as in `_close_up`
                if present and isinstance(error, OutOfMemory):
                    self._learn(max(1, rows - text.width))
                    return
                self._fail(text, self._meaning(error))
            else:
                text.places = [self._rows]
                self._rows += 1
                self._reading.append(text)
                present.append(text)
            self._waiting.remove(text)

    def _loaded_cap(self) -> int:
        return self.loaded.row_cap or self._runner.capacity.sequences

    def _learn(self, rows: int) -> None:
        """There was no memory for more than so many rows."""
        self.loaded.row_cap = min(self._loaded_cap(), rows)
        _log.warning("the device is out of memory", model=self.loaded.key.name, max_rows_from_now=self.loaded.row_cap)

    # ------------------------------------------------------------ one step

    def _decode(self) -> None:
        """One token more for each text that runs."""
        feeds = [Feed([token], text.filled) for text in self._running for token in text.last_tokens()]
        if feeds:
            self._running = self._extend(0, self._running, feeds)

    def _read(self) -> None:
        """Part of the prompts; those that are read through get their first token, and run."""
        if not self._reading:
            return
        first = self._next_to_read()
        counts = portions([text.unread for text in self._reading[first:]], self._portion)
        last = first + len(counts)
        before, texts, after = self._reading[:first], self._reading[first:last], self._reading[last:]
        feeds = [
            Feed(text.job.prompt[text.filled : text.filled + count], text.filled)
            for text, count in zip(texts, counts, strict=True)
        ]
        left = self._extend(texts[0].places[0], texts, feeds)
        self._running += [text for text in left if not text.unread]
        self._reading = [*before, *(text for text in left if text.unread), *after]

    def _next_to_read(self) -> int:
        """In turns what came first and what has the least left: a short prompt need not wait for a long one."""
        self._shortest = not self._shortest
        if not self._shortest:
            return 0
        return min(range(len(self._reading)), key=lambda number: self._reading[number].unread)

    def _extend(self, first_row: int, texts: Sequence[Text], feeds: Sequence[Feed]) -> list[Text]:
        """Extend all rows of these texts, and choose what comes next where a prompt is read through.

        Returns those that go on.
        """
        extended = self._isolation.extend(first_row, feeds)
        place = {row: number for number, row in enumerate(extended.good)}
        chosen: list[Chosen] = []
        onward: list[Text] = []
        row = 0
        for text in texts:
            rows = range(row, row + len(text.places))
            row = rows.stop
            failure = next((extended.failures[each] for each in rows if each in extended.failures), None)
            if failure is not None:
                self._fail(text, failure)
                continue
            text.filled += len(feeds[rows.start].tokens)
            if text.unread:
                onward.append(text)
            else:
                first = place[rows.start]
                chosen.append((text, extended.logits[first : first + len(rows)]))
        for (text, _), said in zip(chosen, advance(self._runner, chosen), strict=True):
            if isinstance(said, Failure):
                self._fail(text, said)
            elif self._say(text, said):
                onward.append(text)
        return onward

    def _close_up(self) -> None:
        """The rows of those that are left stand without a gap, those that run first."""
        places = [place for text in self._in_order() for place in text.places]
        if places == list(range(self._rows)):
            return
        if not places:
            self._rows = 0
            self._runner.drop()
            return
        try:
            self._runner.keep(places)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - OutOfMemory, or whatever a network's own state raises
            self._start_over(error)
            return
        self._rows = 0
        for text in (*self._running, *self._reading):
            text.places = list(range(self._rows, self._rows + len(text.places)))
            self._rows = text.places[-1] + 1

    def _in_order(self) -> list[Text]:
        """Where each text that runs has one row, those at the end fill the gaps: a row is large."""
        rows = len(self._running)
        if all(len(text.places) == 1 for text in self._running):
            at = {text.places[0]: text for text in self._running if text.places[0] < rows}
            moving = iter([text for text in self._running if text.places[0] >= rows])
            self._running = [at[row] if row in at else next(moving) for row in range(rows)]
        return [*self._running, *self._reading]

    def _start_over(self, error: Exception) -> None:
        """Nobody knows what is in the state now."""
        _log.error("the rows of a model's state can't be moved", model=self.loaded.key.name, exc_info=error)
        for text in (*self._running, *self._reading):
            self._fail(text, self._meaning(error))
        self._running, self._reading, self._rows = [], [], 0
        self._runner.drop()

    # ------------------------------------------------------------ what is said

    def _say(self, text: Text, said: Said) -> bool:
        """Whether it goes on."""
        if said.text or said.tokens or said.end:
            self._tell(text, Piece(text.job.number, said.text, said.tokens, said.end, count=text.grown))
        return said.end is None

    def _fail(self, text: Text, failure: Failure) -> None:
        for piece in self._pieces.get(text.job.owner, ()):
            if piece.job == text.job.number:  # it has said something in this step
                piece.failure = failure
                return
        self._tell(text, Piece(text.job.number, failure=failure))

    def _meaning(self, error: Exception) -> Failure:
        if isinstance(error, OutOfMemory):
            return Failure(Code.OVERLOADED, NO_MEMORY)
        return Failure(Code.INTERNAL, InternalFault.TEXT)

    def _tell(self, text: Text, piece: Piece) -> None:
        self._pieces.setdefault(text.job.owner, []).append(piece)

    def _said(self) -> dict[Hashable, list[Piece]]:
        pieces, self._pieces = self._pieces, {}
        return pieces

    def __repr__(self) -> str:
        running, reading, waiting = len(self._running), len(self._reading), len(self._waiting)
        return f"<Stepper running={running} reading={reading} waiting={waiting}>"


def of(loaded: LoadedVersion, clock: Clock) -> Stepper:
    """For a loaded version that generates."""
    return Stepper(loaded, cast("GenerationRunner", loaded.runner), clock)
