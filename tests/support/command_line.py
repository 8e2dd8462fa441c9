"""How unit tests run a command: `run("models", "list")` gives exit code, stdout and stderr."""

from collections.abc import Callable
from typing import TypeAlias

Run: TypeAlias = Callable[..., tuple[int, str, str]]
