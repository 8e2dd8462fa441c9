"""Who holds what: every job that another process works on, with the arena slots lent to that process.

Pure bookkeeping, used on the gateway's event loop only. An entry leaves exactly once: by its answer, or by the death
of its holder. A request that is cancelled meanwhile leaves only its future behind; the slots stay lent (quarantined)
until one of the two happens, so that no process ever writes into memory that was given to somebody else.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from shared.arena import Slot

Job = TypeVar("Job")


class Entry(Generic[Job]):
    """One job in the hands of `holder`."""

    __slots__ = ("holder", "job", "sent_s", "slots")

    def __init__(self, job: Job, holder: str, slots: Sequence[Slot], sent_s: float) -> None:
        self.job = job
        self.holder = holder
        self.slots = slots
        self.sent_s = sent_s


class InFlight(Generic[Job]):
    """Jobs by number and by holder."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry[Job]] = {}
        self.late = 0
        """Answers whose entry had left before: a holder that was given up, or answered twice."""
        self._held: dict[str, dict[int, None]] = {}  # insertion order = the order in which the holder works

    def add(self, number: int, job: Job, holder: str, slots: Sequence[Slot], now_s: float) -> None:
        """The job was sent to `holder`; its slots are lent until `answered` or `lost`."""
        for slot in slots:
            slot.lend(holder)
        self._entries[number] = Entry(job, holder, slots, now_s)
        self._held.setdefault(holder, {})[number] = None

    def answered(self, number: int) -> Entry[Job] | None:
        """The holder answered: the entry leaves, its slots come back. None when it left before (a late answer)."""
        entry = self._entries.pop(number, None)
        if entry is None:
            self.late += 1
            return None
        del self._held[entry.holder][number]
        self._give_back(entry)
        return entry

    def lost(self, holder: str) -> list[Entry[Job]]:
        """The holder is dead: all its entries leave, oldest first."""
        entries = [self._entries.pop(number) for number in self._held.pop(holder, {})]
        for entry in entries:
            self._give_back(entry)
        return entries

    def get(self, number: int) -> Entry[Job] | None:
        """The entry, if it is still out."""
        return self._entries.get(number)

    def oldest(self, holder: str) -> Entry[Job] | None:
        """What the holder works on now (it works in order)."""
        for number in self._held.get(holder, ()):
            return self._entries[number]
        return None

    def of(self, holder: str) -> list[Job]:
        """What the holder has, oldest first."""
        return [self._entries[number].job for number in self._held.get(holder, ())]

    def count(self, holder: str) -> int:
        """How many jobs the holder has."""
        return len(self._held.get(holder, ()))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return "InFlight(" + ", ".join(f"{holder}:{list(held)}" for holder, held in self._held.items() if held) + ")"

    @staticmethod
    def _give_back(entry: Entry[Job]) -> None:
        for slot in entry.slots:
            slot.give_back(entry.holder)
