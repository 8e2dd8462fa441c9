"""Numbers of model.yaml that are none: bounds see to that only where there are two of them."""

import math

import msgspec

from shared.errors import ExitCode, StartupError


def check_finite(settings: msgspec.Struct, where: str) -> None:
    """Raises StartupError(BAD_SETTINGS) naming the first NaN or infinity, in lists and blocks within, too."""
    for field in msgspec.structs.fields(settings):
        _check(getattr(settings, field.name), f"{where}.{field.encode_name}")


def _check(value: object, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise StartupError(ExitCode.BAD_SETTINGS, f"{where} is {value}: a finite number is needed")
    if isinstance(value, msgspec.Struct):
        check_finite(value, where)
    elif isinstance(value, list | tuple):
        for each in value:
            _check(each, where)
