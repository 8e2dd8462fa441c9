"""A repository with an admin service before it, on its socket or over TCP."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_admin import AdminThread, admin_server, admin_settings, repository, short_folder, three_versions

TOKEN = "0123456789abcdef-token"  # noqa: S105 - of this test's server


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In place of pytest's own, which is too deep for a runtime folder when tests run side by side."""
    with tempfile.TemporaryDirectory(prefix="headrace-test-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return repository(tmp_path / "models")


@pytest.fixture
def versions(root: Path) -> list[str]:
    return three_versions(root)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "server.pem", folder / "server.key"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    made_with = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*made_with, *subject, "-keyout", key, "-out", made], check=True, capture_output=True)
    return made, key


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture
def over_tcp(
    root: Path, runtime_dir: Path, certificate: tuple[Path, Path], token_file: Path, versions: list[str]
) -> Iterator[AdminThread]:
    made, key = certificate
    settings = admin_settings(
        root, runtime_dir, address="127.0.0.1:0", certificate=made, key=key, token_file=token_file
    )
    with admin_server(settings) as server:
        yield server
