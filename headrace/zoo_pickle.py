"""Plain data out of a pickle, without ever running one.

A pickle is a program for a small stack machine. This one knows the steps that build dictionaries, strings and numbers,
and takes the two dictionary types of `collections` and one named class for plain dictionaries. Names stay names:
nothing is imported, nothing called, and any other step ends the reading.
"""

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

from shared.errors import ExitCode, StartupError

_MARK = object()
_DICTIONARIES = {("collections", "OrderedDict"), ("collections", "defaultdict")}
MAX_STEPS = 10_000_000
"""The largest that is read here has 2 million."""


class _Name(NamedTuple):
    module: str
    name: str


class _Machine:
    def __init__(self, kind: tuple[str, str]) -> None:
        self.stack: list[Any] = []
        self._memo: list[Any] = []
        self._allowed = {*_DICTIONARIES, kind}

    def step(self, name: str, argument: Any) -> None:  # noqa: ANN401 - whatever the format holds
        """One step. Raises StartupError for one that is not known here."""
        if name in {"BININT", "BININT1", "BININT2", "SHORT_BINUNICODE", "BINUNICODE"}:
            self.stack.append(argument)
        elif name in {"BINGET", "LONG_BINGET"}:
            self.stack.append(self._memo[argument])
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _STEPS:
            _STEPS[name](self)
        elif name not in {"PROTO", "FRAME", "STOP"}:
            raise _refused(f"holds a step that only code needs ({name})")

    def memoize(self) -> None:
        self._memo.append(self.stack[-1])

    def set_items(self) -> None:
        start = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        flat = self.stack[start + 1 :]
        del self.stack[start:]
        self._dictionary().update(zip(flat[::2], flat[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._dictionary()[key] = value

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(state, dict):
            raise _refused("gives an object a state that is no dictionary")
        self._dictionary().update(state)

    def name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_Name(str(module), str(name)))

    def tuple_of_one(self) -> None:
        self.stack.append((self.stack.pop(),))

    def make(self) -> None:
        """Where a pickle calls a class; its arguments (a default's type at most) are not needed."""
        self.stack.pop()
        kind = self.stack.pop()
        if kind not in self._allowed or not isinstance(kind, _Name):
            raise _refused(f"wants to call {ascii(kind)[:100]}")
        self.stack.append({})

    def _dictionary(self) -> dict[Any, Any]:
        found = self.stack[-1]
        if not isinstance(found, dict):
            raise _refused("puts items into what is no dictionary")
        return found


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "MARK": lambda: _MARK,
}
_STEPS: dict[str, Callable[[_Machine], None]] = {
    "MEMOIZE": _Machine.memoize,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "BUILD": _Machine.build,
    "STACK_GLOBAL": _Machine.name,
    "TUPLE1": _Machine.tuple_of_one,
    "NEWOBJ": _Machine.make,
    "REDUCE": _Machine.make,
}


def dictionary_in(raw: bytes, kind: tuple[str, str]) -> dict[str, Any]:
    """The attributes of the one object that a pickle holds; `kind`: module and name of its class, which is not loaded.

    Raises StartupError for a pickle that is broken or holds anything but dictionaries, strings, numbers.
    """
    machine = _Machine(kind)
    try:
        for steps, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
            if steps >= MAX_STEPS:
                raise _refused(f"has more than {MAX_STEPS} steps")
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, TypeError) as error:
        raise _refused(f"is broken ({error})") from None
    found = machine.stack[-1] if len(machine.stack) == 1 else None
    if not isinstance(found, dict):
        raise _refused("is no single object")
    return found


def _refused(why: str) -> StartupError:
    return StartupError(ExitCode.MODEL_LOAD, f"the pickle {why}: it is not read")
