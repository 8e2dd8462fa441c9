"""What a test does that this machine can't run: skipped on a developer's, a failure where everything must run."""

import os
from typing import NoReturn

import pytest

MUST_RUN = "TESTS_MUST_RUN"
"""Set by `.ci/run`: there a registry that can't be reached, or a port that somebody else has, would hide tests."""


def cannot_run(reason: str) -> NoReturn:
    """Skip the present test, or fail it."""
    if os.environ.get(MUST_RUN):
        pytest.fail(f"{reason}, and {MUST_RUN} is set")
    pytest.skip(reason)
