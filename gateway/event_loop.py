"""The gateway's event loop: uvloop where it is installed, else asyncio's own. Called once, at the process's start."""

import asyncio
import importlib


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop that nobody has set yet. uvloop is for CPython on Linux and macOS; without it all works, only slower."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
