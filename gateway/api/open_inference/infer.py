"""One inference request of the protocol, whichever codec it came through: checks → flow → output tensors."""

import re
from contextlib import ExitStack, suppress

from gateway.api.native import Answers
from gateway.api.open_inference import inputs, outputs, parameters, texts
from gateway.api.open_inference.model import InferInput, InferOutput, InferRequest, InferResponse
from gateway.api.open_inference.models import Models, Served, find, view_of
from gateway.api.open_inference.shared_memory import REGION, Place, SharedMemory
from gateway.api.open_inference.texts import Reader
from gateway.api.parse import shown
from gateway.request import Request, StageTimes
from gateway.statistics import Statistics
from shared.clock import now_s
from shared.errors import HeadraceError, InvalidInput, UnknownModel
from shared.settings import Settings

_LOGGABLE = re.compile(r"[ -~]{1,128}")


def log_id(given: str, made: str) -> str:
    """The id for our logs and trailing metadata: the caller's own when it can stand there, else `made`.

    The protocol's id may be any text of any length, and comes back in the answer as it is in either case.
    """
    return given if _LOGGABLE.fullmatch(given) else made


class Infer:
    """What `ModelInfer`, `ModelStreamInfer` and REST's `infer` share. Event loop only."""

    def __init__(self, flow: Answers, models: Models, settings: Settings, statistics: Statistics) -> None:
        """`statistics` counts what is refused here; what reaches the flow is counted there."""
        self._flow = flow
        self._statistics = statistics
        self._models = models
        self._limits = settings.admission
        self.memory = SharedMemory(settings.gateway.system_shared_memory_prefix, settings.gateway.max_message_bytes)

    async def infer(self, request: InferRequest, request_id: str, times: StageTimes) -> InferResponse:
        """Answer one request within its deadline. Raises HeadraceError; cancelling drops all of its work.

        `request_id` is for our logs (`log_id`); `times` is filled on the way, also when the request fails.
        """
        answer = await self.grow(request, request_id, times, None)
        if answer is None:
            raise TypeError("a request was answered in parts that nobody takes")
        return answer

    async def grow(
        self, request: InferRequest, request_id: str, times: StageTimes, reader: Reader | None
    ) -> InferResponse | None:
        """The same; a text is answered in many parts, which `reader` takes while it grows, and by nothing else."""
        model = find(self._models, request.model, request.version)
        with ExitStack() as places:
            try:
                ready = self._request(model, request, places)
                targets = self._targets(request, places)
            except HeadraceError as error:
                self.refused(model.name, error, request.arrived_s)
                raise
            ready.request_id, ready.times = request_id, times
            if reader is not None and model.pipeline.generates and len(ready.inputs) == 1 and not targets:
                ready.write = texts.writer(request, reader)
            answer = await self._flow.answer(ready)
            if ready.write is not None:
                return None
            found = outputs.selected(model, answer, request.outputs)
            written = [_written(output, targets.get(output.name)) for output in found]
        return InferResponse(model.name, answer.version, request.id, written, texts.facts_of(answer))

    def refused(self, name: str, error: HeadraceError, arrived_s: float) -> None:
        """A request was refused before the flow saw it; a codec calls this for its own refusals."""
        with suppress(UnknownModel):  # never a counter for a name that a caller made up
            version = find(self._models, name, "").version
            self._statistics.of(name, version).failed(error.code, now_s() - arrived_s)

    def _request(self, model: Served, request: InferRequest, places: ExitStack) -> Request:
        """Every check that needs no work of others; what is refused here has cost nothing but its message."""
        view = view_of(model)
        parameters.check(request.parameters)
        deadline_s = parameters.deadline_s(request)  # whether it has passed is for the flow to see, and to count
        outputs.check_asked(model, view, request.outputs)

        def data_of(where: str, given: InferInput, fixed: int | None) -> bytes | memoryview:
            if REGION not in given.parameters:
                return given.data
            place = places.enter_context(self.memory.place(where, given.parameters))
            if fixed is not None and place.nbytes != fixed:
                raise InvalidInput(f"{where} has {place.nbytes} bytes in shared memory; its shape needs {fixed}")
            return place.read()

        raw = inputs.raw_inputs(model, view, request, self._limits, data_of)
        options = parameters.options(request.parameters, model.pipeline.options_type)
        if model.pipeline.generates:
            texts.check_asked(options, len(raw))
        return Request(
            model=model.name,
            version=model.version if request.version else "",
            request_id="",
            inputs=raw,
            options=outputs.with_classes_asked(model, options, request.outputs),
            priority=parameters.priority(request.parameters),
            routing_key=parameters.routing_key(request.parameters),
            reuse=parameters.reuse(request.parameters),
            deadline_s=deadline_s,
            arrived_s=request.arrived_s,
            nbytes=sum(one.nbytes for one in raw),
        )

    def _targets(self, request: InferRequest, places: ExitStack) -> dict[str, Place]:
        """Outputs that go to shared memory; their regions stay open until the answer is written."""
        return {
            wanted.name: places.enter_context(
                self.memory.place(f"output {shown(wanted.name)}", wanted.parameters),
            )
            for wanted in request.outputs
            if REGION in wanted.parameters
        }


def _written(output: InferOutput, target: Place | None) -> InferOutput:
    if target is None:
        return output
    target.write(output.data)
    return output._replace(data=b"")
