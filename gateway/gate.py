"""Before a call's message is read: could anything be done for it? Pure policy of the gateway process.

Which model a call is for stands in its message, so only what holds for every model is a reason here: the doors are
closed, the server is full, or no served model could answer one more row within the call's time. What passes is looked
at again with its model and size (`gateway/flow.py`).

A refusal before reading costs about two thirds of one after it (docs/decisions/overload.md), and under overload that is
what most calls get.
"""

from gateway.admission import Admission
from gateway.forecast import Forecast
from gateway.metrics import Metrics
from shared.errors import Code, HeadraceError


class Gate:
    """Asked by the edge for each call of a method that is called often. Event loop only."""

    def __init__(self, admission: Admission, forecast: Forecast, metrics: Metrics) -> None:
        self._admission = admission
        self._forecast = forecast
        self._metrics = metrics

    def refusal(self, budget_s: float, reading: int, now_s: float) -> HeadraceError | None:
        """None when the call is worth reading; else why not, counted as a request of model `unknown`.

        `budget_s` seconds are left for it; `reading` calls have passed here and are not yet seen by the flow.
        """
        try:
            if self._admission.full:
                self._admission.admit(1, 0, now_s).release()
            refusal = self._forecast.refusal(budget_s, reading, now_s)
        except HeadraceError as error:
            refusal = error
        if refusal is not None:
            self._metrics.unread(refusal.code)
        return refusal

    def expired(self) -> None:
        """A call's time was over before anything was done for it: counted as a request of model `unknown`."""
        self._metrics.unread(Code.DEADLINE_EXCEEDED)
