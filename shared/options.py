"""What a request's option values have in common, whatever the pipeline. Used by `shared.pipeline` and the pipelines."""

import math
from typing import TypeVar

import msgspec

from shared.errors import InvalidOption

S = TypeVar("S", bound=msgspec.Struct)


def finite(options: S) -> S:
    """The same options. Raises InvalidOption naming the first number, alone or in a list, that is NaN or infinite.

    Bounds see to that only where there are two of them: infinity is within `msgspec.Meta(gt=0)`, and without any bound
    NaN passes, too: it is neither below nor above anything, so that a threshold of NaN keeps nothing or everything.
    """
    for field in msgspec.structs.fields(options):
        value = getattr(options, field.name)
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise InvalidOption(f"options.{field.encode_name} is {number}: a finite number is needed")
    return options
