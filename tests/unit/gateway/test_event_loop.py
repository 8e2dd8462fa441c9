import asyncio
import sys

import pytest

from gateway.event_loop import new_event_loop


def test_uvloop_is_taken_where_it_is_installed() -> None:
    pytest.importorskip("uvloop")
    loop = new_event_loop()
    assert type(loop).__module__.startswith("uvloop")
    loop.close()


def test_without_uvloop_asyncio_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    assert isinstance(loop, asyncio.SelectorEventLoop)
    loop.close()
