"""Texts that wait for room in a version's state, by owner: whoever has the fewest rows is next. Pure."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator

from shared.errors import Code
from workers.generation.sequences import Text
from workers.jobs import Refused

MAX_WAITING = 256
"""Texts of one gateway. It keeps to the limits that it was told; with several gateways on one worker each of them may
ask for all there is."""


class Line:
    """Of one version."""

    def __init__(self) -> None:
        self._texts: dict[Hashable, deque[Text]] = {}

    def add(self, text: Text) -> None:
        """At the end of its owner's. Raises Refused."""
        texts = self._texts.setdefault(text.job.owner, deque())
        if len(texts) == MAX_WAITING:
            raise Refused(Code.OVERLOADED, f"{MAX_WAITING} prompts wait for this model")
        texts.append(text)

    def next(self, present: Iterable[Text]) -> Text | None:
        """Whose turn it is, given those that have rows; None when nobody waits. It stays first until it has gone."""
        rows = dict.fromkeys(self._texts, 0)
        for text in present:
            if text.job.owner in rows:
                rows[text.job.owner] += text.width
        return self._texts[min(rows, key=rows.__getitem__)][0] if rows else None

    def remove(self, text: Text) -> None:
        """The one whose turn it was has gone."""
        texts = self._texts[text.job.owner]
        texts.remove(text)
        if not texts:
            del self._texts[text.job.owner]

    def keep(self, wanted: Callable[[Text], bool]) -> None:
        """All others go."""
        kept = {owner: deque(filter(wanted, texts)) for owner, texts in self._texts.items()}
        self._texts = {owner: texts for owner, texts in kept.items() if texts}

    def __iter__(self) -> Iterator[Text]:
        return (text for texts in self._texts.values() for text in texts)

    def __len__(self) -> int:
        return sum(map(len, self._texts.values()))
