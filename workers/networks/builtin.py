"""Networks of the tiny built-in models: for trying protocols and clients, and for measuring the server itself."""

from collections.abc import Callable

import numpy as np

from shared.tensors import Array


def identity() -> Callable[[Array], Array]:
    """What comes in goes out."""
    return lambda array: array


def add_sub() -> Callable[[Array, Array], tuple[Array, Array]]:
    """Two integer arrays in; their sum and difference out (wrapping, as integers do)."""
    return lambda first, second: (np.add(first, second), np.subtract(first, second))
