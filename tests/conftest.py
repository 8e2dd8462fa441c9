"""Marks every test by its folder, so that `pytest -m unit` and `pytest tests/unit` mean the same."""

from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no failure: examples have no time limit of their own (each test has pytest-timeout's).
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

_KINDS = {"unit", "integration", "e2e", "gpu", "architecture"}
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = item.path.relative_to(_HERE).parts[0]
        if kind in _KINDS:
            item.add_marker(getattr(pytest.mark, kind))
