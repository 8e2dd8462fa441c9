"""BYTES elements as callers send them: counted before anything of their number is made, never copied to be checked.

`where` begins the sentence of a refusal, e.g. "input 'x'".
"""

from shared.errors import InvalidInput
from shared.tensors import MAX_BYTES_ELEMENTS, element_places, element_views


class Allowance:
    """What is left of the elements that one request may have in all of its tensors: reading them blocks the edge."""

    def __init__(self) -> None:
        self._left = MAX_BYTES_ELEMENTS

    def take(self, where: str, count: int) -> None:
        """Raises InvalidInput when a tensor of so many elements is more than what is left."""
        if count > self._left:
            before = MAX_BYTES_ELEMENTS - self._left
            after = f" after {before} in the tensors before it" if before else ""
            raise InvalidInput(
                f"{where} has {count} BYTES elements{after}; a request may have at most {MAX_BYTES_ELEMENTS}"
            )
        self._left -= count


def check(where: str, data: bytes | memoryview, count: int) -> None:
    """The data is exactly `count` elements. Raises InvalidInput."""
    try:
        element_places(data, count)
    except ValueError as error:
        raise InvalidInput(f"{where} has {error}") from None


def views(where: str, data: bytes | memoryview, count: int) -> list[memoryview]:
    """The elements without a copy. Raises InvalidInput."""
    try:
        return element_views(data, count)
    except ValueError as error:
        raise InvalidInput(f"{where} has {error}") from None
