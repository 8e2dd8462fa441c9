"""How many rows the workers' memory holds, as they have learned from running out of it: batches follow that.

A worker halves what does not fit and answers it all the same. But a batch that is then run in parts takes as long as
those parts, which neither the batcher nor the forecast would expect.
"""

from collections.abc import Callable, Iterable

from gateway.batcher import BatchLimits
from gateway.served import ServedModel
from gateway.worker_client import Worker, WorkerEvents
from shared.messages import ModelLoaded, ModelNote


class RowCaps(WorkerEvents):
    """Implements the worker events; lives on the event loop. Of several workers the smallest cap counts."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]], configure: Callable[[ServedModel], None]) -> None:
        """`configure(model)` is called after the model's limits have changed."""
        self._models = models
        self._configure = configure
        self._caps: dict[int, dict[bytes, int]] = {}
        self._whole: dict[int, BatchLimits] = {}
        """By model: the limits as they are in the settings."""

    def model_loaded(self, worker: Worker, message: ModelLoaded) -> None:
        """It may have learned its cap from an earlier gateway."""
        self._learn(worker, message.model, message.row_cap)

    def model_noted(self, worker: Worker, message: ModelNote) -> None:
        """It has learned a cap."""
        self._learn(worker, message.model, message.row_cap)

    def worker_lost(self, worker: Worker) -> None:
        """The one that comes in its place begins anew."""
        for model in [model for model, caps in self._caps.items() if worker.identity in caps]:
            self._learn(worker, model, None)

    def forget(self, number: int) -> None:
        """The version is gone for good."""
        self._caps.pop(number, None)
        self._whole.pop(number, None)

    def _learn(self, worker: Worker, number: int, rows: int | None) -> None:
        caps = self._caps.setdefault(number, {})
        caps.pop(worker.identity, None)
        if rows is not None:
            caps[worker.identity] = rows
        model = next((model for model in self._models() if model.number == number), None)
        if model is None:  # unloaded meanwhile
            self._caps.pop(number, None)
            self._whole.pop(number, None)
            return
        whole = self._whole.setdefault(number, model.limits)
        limits = whole.capped(min(caps.values())) if caps else whole
        if limits != model.limits:
            model.limits = limits
            self._configure(model)
