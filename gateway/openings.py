"""Which pool process builds which pipeline next. Pure policy.

A process that builds one takes no job for some hundred milliseconds. At a start all build at once, for there is
nothing else to do; later one after another, so that jobs always find a free process. That a pipeline is open is said
only when no process has still to be asked: a job for it may go to any.
"""

from collections.abc import Collection, Iterable


class Openings:
    """Of all living processes, by identity; models by the gateway's number."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[int]] = {}
        """What each process has still to be asked for, in order."""
        self._building: dict[bytes, set[int]] = {}
        self._worked: set[bytes] = set()
        """Processes that have been ready for jobs."""
        self._open: dict[int, None] = {}
        """Models that a process has built while others had still to be asked; in order."""

    def came(self, process: bytes, models: Iterable[int]) -> None:
        """A process takes messages; it has to build all of these before it is ready."""
        self._waiting[process] = list(models)
        self._building[process] = set()

    def wanted(self, model: int) -> None:
        """Every process is to build this one, too."""
        for models in self._waiting.values():
            models.append(model)

    def due(self) -> list[tuple[bytes, int]]:
        """Who is to be asked for what now; taken as done."""
        turn = [process for process in self._waiting if process not in self._worked]  # nobody misses these
        if not any(self._building[process] for process in self._worked):
            turn += [process for process in self._waiting if process in self._worked and self._waiting[process]][:1]
        asked = [(process, model) for process in turn for model in self._waiting[process]]
        for process, model in asked:
            self._building[process].add(model)
        for process in turn:
            self._waiting[process] = []
        return asked

    def built(self, process: bytes, model: int) -> None:
        """A process has built this one."""
        self.refused(process, model)
        self._open[model] = None

    def refused(self, process: bytes, model: int) -> None:
        """A process can't build this one."""
        building = self._building.get(process)
        if building is None:
            return
        building.discard(model)
        if not building and not self._waiting[process]:
            self._worked.add(process)

    def open(self) -> list[int]:
        """Models that are open from now on, and of which that has not been said."""
        waiting: Collection[int] = {model for models in self._waiting.values() for model in models}
        found = [model for model in self._open if model not in waiting]
        for model in found:
            del self._open[model]
        return found

    def closed(self, model: int) -> None:
        """Nobody needs this one any more."""
        self._open.pop(model, None)
        for process, models in self._waiting.items():
            self._waiting[process] = [each for each in models if each != model]
            self._building[process].discard(model)

    def left(self, process: bytes) -> None:
        """A process is gone, or will be after its present job."""
        for table in (self._waiting, self._building):
            table.pop(process, None)
        self._worked.discard(process)
