"""One image or text as a plain upload, its answer as JSON, as `POST /v1/classify`: for curl, browsers and scripts."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import APIRouter
from fastapi.responses import Response

from gateway.api.http_call import DirectRoute, HttpCall, HttpEdge, json_response
from gateway.api.http_docs import Operation, add
from gateway.api.multipart import Part, parts
from gateway.api.native import Answers
from gateway.api.open_inference.infer import log_id
from gateway.api.open_inference.models import Models, find
from gateway.api.parse import check_routing_key, may_reuse, shown
from gateway.request import Answer, StageTimes
from gateway.request import Request as FlowRequest
from shared.errors import HeadraceError, InvalidInput
from shared.pipeline import Kind, RawInput
from shared.results import Result

_OWN = ("model", "version", "timeout_ms", "routing_key", "cache")
"""Query parameters that are ours; all others are options of the model."""
_FORM = "multipart/form-data"
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?(e-?[0-9]{1,2})?", re.ASCII)


class UploadTask(NamedTuple):
    """What one endpoint answers."""

    name: str
    """In metrics and logs."""
    doc: Operation
    answers: type[Result]
    """The only kind of result that it can tell."""
    noun: str
    """For a model that answers something else: it does not answer with `noun`."""
    told: Callable[[Any], dict[str, Any]]
    """A result of that kind as JSON."""
    lists: frozenset[str] = frozenset()
    """Options that may be given several times."""
    kind: Kind | None = None
    """What the upload is where no model is named; None: its content type says whether it is a text or an image."""
    pipeline: str = ""
    """Whose models are meant where none is named, if there are any; empty: those that classify what the upload is."""


class Upload:
    """One endpoint. Event loop only."""

    def __init__(self, task: UploadTask, edge: HttpEdge, flow: Answers, models: Models) -> None:
        self._task = task
        self._edge = edge
        self._flow = flow
        self._models = models

    def router(self) -> APIRouter:
        """Its route."""
        router = APIRouter(route_class=DirectRoute)
        add(router, self._task.doc, self._edge.counted(self._task.name, self))
        return router

    async def __call__(self, call: HttpCall) -> Response:
        """Raises HeadraceError."""
        request = call.request
        items = request.query_params.multi_items()
        query = self._by_name(items)
        model, version = query.get("model", ""), query.get("version", "")
        if model:
            self._check_takes(model, version)  # before the upload is read
        content_type = request.headers.get("content-type", "")
        body = await call.body.read()
        if content_type.lower().startswith(_FORM):
            payload, fields = _from_form(parts(body, content_type))
            items = [*items, *fields]
            query = self._by_name(items)
            model, version = query.get("model", ""), query.get("version", "")
        else:
            payload = memoryview(body)
        if not payload:
            raise InvalidInput("the upload has 0 bytes; at least 1 is needed")
        kind: Kind = self._check_takes(model, version) if model else self._task.kind or _kind(content_type)
        many = {name: [text for key, text in items if key == name] for name in self._task.lists & query.keys()}
        options = {name: _value(text) for name, text in query.items() if name not in _OWN} | many
        return await self._answered(call, RawInput(kind=kind, data=payload), query, options)

    def _by_name(self, items: list[tuple[str, str]]) -> dict[str, str]:
        """Raises InvalidInput for a name that is given twice."""
        found: dict[str, str] = {}
        for name, text in items:
            if name in found and name not in self._task.lists:
                raise InvalidInput(f"parameter {shown(name)} is given twice")
            found[name] = text
        return found

    def _check_takes(self, model: str, version: str) -> Kind:
        kind = find(self._models, model, version).spec.kind
        if kind == "tensors":
            raise InvalidInput(f"model {shown(model)} takes tensors: use POST /v2/models/{model}/infer")
        return kind

    async def _answered(
        self, call: HttpCall, raw: RawInput, query: dict[str, str], options: dict[str, Any]
    ) -> Response:
        call.request_id = log_id(call.request.headers.get("request-id", ""), call.request_id)
        call.times = times = StageTimes()
        if "timeout_ms" in query:
            call.deadline_s = self._edge.limited(call.arrived_s, _milliseconds(query["timeout_ms"]) / 1e3)
        routing_key = query.get("routing_key", "")
        check_routing_key(routing_key)
        reuse = may_reuse(query.get("cache", ""))
        answer = await call.while_connected(
            self._flow.answer(
                FlowRequest(
                    model=query.get("model", ""),
                    version=query.get("version", ""),
                    request_id=call.request_id,
                    inputs=[raw],
                    options=options,
                    deadline_s=call.deadline_s,
                    arrived_s=call.arrived_s,
                    nbytes=raw.nbytes,
                    routing_key=routing_key,
                    reuse=reuse,
                    times=times,
                    task=self._task.pipeline or f"{raw.kind}_classification",
                )
            )
        )
        return json_response(_told(self._task, answer, call.request_id, times), call.headers())


def _kind(content_type: str) -> Kind:
    return "text" if content_type.lower().startswith("text/plain") else "image"


def _from_form(form: list[Part]) -> tuple[memoryview, list[tuple[str, str]]]:
    """The one file, and the other fields, which mean the same as query parameters. Raises InvalidInput."""
    files = [part for part in form if part.is_file or part.name == "file"]
    if len(files) != 1:
        names = ", ".join(shown(part.name) for part in form[:5]) or "nothing"
        raise InvalidInput(
            f"the form has {len(files)} files and needs exactly 1 (curl -F file=@cat.jpg); it has {names}"
        )
    try:
        fields = [(part.name, str(part.data, "utf-8")) for part in form if part is not files[0]]
    except UnicodeDecodeError:
        raise InvalidInput("a field of the form is not UTF-8") from None
    return files[0].data, fields


def _value(text: str) -> Any:  # noqa: ANN401 - the model's pipeline checks it
    """An option's value as its pipeline expects it: a number, a truth value or a text."""
    if text in {"true", "false"}:
        return text == "true"
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _milliseconds(text: str) -> float:
    value = _value(text)
    if isinstance(value, bool | str) or value <= 0:
        raise InvalidInput(f"timeout_ms is {shown(text)}; it has to be a number of milliseconds above 0")
    return float(value)


def _told(task: UploadTask, answer: Answer, request_id: str, times: StageTimes) -> dict[str, Any]:
    result = answer.results[0]
    if isinstance(result, HeadraceError):
        raise result
    if not isinstance(result, task.answers):
        raise InvalidInput(
            f"model {shown(answer.model)} does not answer with {task.noun}: use POST /v2/models/{answer.model}/infer"
        )
    return {
        "model": answer.model,
        "version": answer.version,
        "request_id": request_id,
        **task.told(result),
        "server_timing": {
            "admit_ms": _ms(times.admit_s),
            "wait_ms": _ms(times.wait_s),
            "prepare_ms": _ms(times.prepare_s),
            "batch_ms": _ms(times.batch_s),
            "copy_ms": _ms(times.copy_s),
            "run_ms": _ms(times.run_s),
            "finish_ms": _ms(times.finish_s),
            "batch_rows": times.batch_rows,
        },
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
