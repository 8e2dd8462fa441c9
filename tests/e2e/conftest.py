"""One simulated server for the tests that only use it; those that break processes start their own."""

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.support.stack import Site, serving, simulated_repository


@pytest.fixture(scope="session")
def jpeg() -> bytes:
    """A 500 x 375 photo-like JPEG: smooth shapes and some noise, always the same."""
    random = np.random.default_rng(1)
    small = random.integers(0, 255, (6, 8, 3), np.uint8)
    image = cv2.resize(small, (500, 375), interpolation=cv2.INTER_CUBIC)
    image = cv2.add(image, random.integers(0, 12, image.shape, np.uint8))
    return cv2.imencode(".jpg", image)[1].tobytes()


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two simulated classifiers."""
    return simulated_repository(tmp_path_factory.mktemp("repository") / "models", "sim", "second")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[Site]:
    """A server that runs for the whole session; tests must leave it as it was."""
    site = Site(tmp_path_factory.mktemp("site"), repository, gateway={"max_message_bytes": 4 * 1024 * 1024})
    with serving(site):
        yield site


@pytest.fixture
def own_site(tmp_path: Path, repository: Path) -> Iterator[Site]:
    """A folder with settings for a test that starts and breaks its own processes."""
    site = Site(tmp_path / "site", repository, models=["sim"])
    yield site
    site.kill_all()
