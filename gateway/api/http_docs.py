"""How an HTTP endpoint is described, once: for its routes, `/openapi.json` and `/docs`."""

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]

_MODEL = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "A served model's name; `POST /v2/repository/index` lists them.",
}
_VERSION = {
    "name": "version",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "16 hexadecimal digits; the paths without it take the current version.",
}
_REGION = {
    "name": "region",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "The name that requests use in their parameter shared_memory_region.",
}
HOST = "http://127.0.0.1:8000"
"""In examples."""
BINARY = {"type": "string", "format": "binary"}
"""Schema of a body that is no text."""


class Operation(NamedTuple):
    """One endpoint: its paths, and its description in OpenAPI's words."""

    endpoint: str
    """Its name."""
    method: str
    paths: tuple[str, ...]
    tag: str
    summary: str
    description: str
    curl: str
    """What a person would type behind `curl`."""
    answer: Any
    """An example."""
    content: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default, never changed
    """The request body's content types."""
    query: tuple[dict[str, Any], ...] = ()

    def openapi(self, path: str) -> dict[str, Any]:
        """The hand-written part of the operation's OpenAPI object."""
        in_path = [one for one in (_MODEL, _VERSION, _REGION) if f"{{{one['name']}}}" in path]
        described: dict[str, Any] = {
            "parameters": [*in_path, *self.query],
            "responses": {
                "200": {"description": "Done.", "content": {"application/json": {"example": self.answer}}},
                "4XX": _ERROR | {"description": "The request can't succeed as it is, or (429) there is no room now."},
                "5XX": _ERROR | {"description": "Not ready, stopping (503), late (504), or a fault of ours (500)."},
            },
        }
        if self.content:
            described["requestBody"] = {"content": self.content}
        return described


_ERROR: dict[str, Any] = {
    "content": {"application/json": {"example": {"error": "model 'cat' is not served"}}},
    "headers": {
        "error-reason": {"description": "The reason as a word, e.g. unknown_model.", "schema": {"type": "string"}},
        "retry-after": {"description": "Seconds; only where a retry can help.", "schema": {"type": "integer"}},
        "request-id": {"description": "Finds the request in the server's log.", "schema": {"type": "string"}},
    },
}


def query_parameter(name: str, kind: str, description: str) -> dict[str, Any]:
    """A query parameter."""
    return {"name": name, "in": "query", "schema": {"type": kind}, "description": description}


def add(router: APIRouter, operation: Operation, endpoint: Endpoint) -> None:
    """The routes of one operation."""
    for path in operation.paths:
        router.add_api_route(
            path,
            endpoint,
            methods=[operation.method],
            tags=[operation.tag],
            summary=operation.summary,
            description=operation.description,
            operation_id=f"{operation.endpoint}{operation.paths.index(path) or ''}",
            openapi_extra=operation.openapi(path),
        )
