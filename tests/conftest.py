"""Marks every test by its folder, so that `pytest -m unit` and `pytest tests/unit` mean the same.

`make test` runs two processes of pytest side by side, and after that the tests marked `alone` by themselves: those
that judge times or a machine's load. With `--dist loadfile` a file stays in one process, so that its server is started
once.
"""

from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no failure: examples have no time limit of their own (each test has pytest-timeout's).
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

_KINDS = {"unit", "integration", "e2e", "gpu", "architecture"}
_HERE = Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    kind = item.path.relative_to(_HERE).parts[0]
    if kind in _KINDS:
        item.add_marker(getattr(pytest.mark, kind))
