"""The error table is total: nothing can fail in a way that the edge has no status for."""

import pytest

from gateway.api.status import TABLE
from shared.errors import BY_CODE, CallerFault, Code, HeadraceError, ServerFault


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_status_and_a_type(code: Code) -> None:
    assert code in TABLE
    assert BY_CODE[code].code is code


def _all(base: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [base, *(found for child in base.__subclasses__() for found in _all(child))]


def test_every_error_is_the_callers_fault_or_ours_and_has_its_own_code() -> None:
    leaves = [error for error in _all(HeadraceError) if not error.__subclasses__()]
    assert all(issubclass(error, CallerFault) != issubclass(error, ServerFault) for error in leaves)
    assert len({error.code for error in leaves}) == len(leaves)
