from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[EventDict]]:
    """What was logged; unconfigured, each trace would be drawn with colours and local variables, slowly."""
    with capture_logs() as lines:
        yield lines
