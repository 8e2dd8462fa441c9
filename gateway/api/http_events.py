"""Server-sent events: an HTTP answer that is written bit by bit, over one connection that stays open meanwhile."""

from collections.abc import Awaitable, Callable

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx would collect the events
}


class Events:
    """Where one answer's events go. A reader who is slow holds up only whoever writes them."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.headers: dict[str, str] = {}
        """Sent before the first event, besides those of the form."""
        self.has_begun = False

    async def write(self, data: bytes) -> None:
        """One event; `data` has no line break, as JSON has none."""
        if not self.has_begun:
            self.has_begun = True
            headers = [(name.encode(), value.encode()) for name, value in {**_HEADERS, **self.headers}.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def end(self) -> None:
        """No more events."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def instead(self, response: Response) -> None:
        """An answer of another kind; only before the first event."""
        await response(self._scope, self._receive, self._send)


class EventStream(Response):
    """What an endpoint returns; `write_all` then does its work."""

    def __init__(self, write_all: Callable[[Events], Awaitable[None]]) -> None:
        super().__init__()
        self._write_all = write_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the framework."""
        await self._write_all(Events(scope, receive, send))
