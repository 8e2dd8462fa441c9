"""What the admin service checks before it listens on TCP."""

import subprocess
from pathlib import Path

import pytest

from gateway.api.admin import Admin, Behind
from gateway.api.admin_server import TokenCheck, start_admin
from shared.errors import ExitCode, StartupError
from tests.support.fake_admin import Control, admin_settings, repository

TOKEN = b"0123456789abcdef"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "server.pem", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, "-subj", "/CN=a", "-keyout", key, "-out", made], check=True, capture_output=True)
    return made, key


async def _refusal(tmp_path: Path, pair: tuple[Path, Path], token_file: Path) -> StartupError:
    root = repository(tmp_path / "models")
    settings = admin_settings(
        root, tmp_path / "run", address="127.0.0.1:0", certificate=pair[0], key=pair[1], token_file=token_file
    )
    control = Control(root)
    with pytest.raises(StartupError) as caught:
        await start_admin(settings, tmp_path / "admin.sock", Admin(settings, Behind(control, control)))
    assert caught.value.exit_code is ExitCode.BAD_SETTINGS
    assert not (tmp_path / "admin.sock").exists()
    return caught.value


def _file(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
async def test_a_token_that_others_can_read_is_refused(tmp_path: Path, pair: tuple[Path, Path], mode: int) -> None:
    error = await _refusal(tmp_path, pair, _file(tmp_path, TOKEN, mode))
    assert error.text == "admin.token_file can be read by others: chmod 600 it"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
async def test_so_is_a_key(tmp_path: Path, pair: tuple[Path, Path], mode: int) -> None:
    key = tmp_path / "open.key"
    key.write_bytes(pair[1].read_bytes())
    key.chmod(mode)
    error = await _refusal(tmp_path, (pair[0], key), _file(tmp_path, TOKEN))
    assert error.text == "admin.key can be read by others: chmod 600 it"
    assert error.detail == str(key)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        TOKEN[:-1],
        TOKEN[:-1] + b"\n",
        b"two words of it here",
        TOKEN + b"\n" + TOKEN,
        b"\xff" * 20,
        b"x" * 4097,
    ],
)
async def test_what_is_no_token_is_refused(tmp_path: Path, pair: tuple[Path, Path], content: bytes) -> None:
    error = await _refusal(tmp_path, pair, _file(tmp_path, content))
    assert error.text.startswith("admin.token_file must hold one line of 16 to 4096 printable ASCII characters")


async def test_files_that_are_missing_are_named_by_their_setting(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    token, missing = _file(tmp_path, TOKEN), tmp_path / "missing"
    assert (await _refusal(tmp_path / "a", pair, missing)).text.startswith("admin.token_file can't be read")
    assert (await _refusal(tmp_path / "b", (missing, pair[1]), token)).text.startswith("admin.certificate can't be")
    assert (await _refusal(tmp_path / "c", (pair[0], missing), token)).text.startswith("admin.key can't be read")


async def test_a_key_that_does_not_belong_to_the_certificate_is_refused(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    token = _file(tmp_path, TOKEN)
    pair[0].chmod(0o600)  # as a key it must be nobody else's
    for number, wrong in enumerate(((pair[1], pair[0]), (pair[0], token), (pair[0], pair[0]))):
        error = await _refusal(tmp_path / str(number), wrong, token)
        assert "not a PEM certificate and its key" in error.text


@pytest.fixture
def locked(tmp_path: Path, pair: tuple[Path, Path]) -> Path:
    path = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", pair[1], "-out", path, "-aes256", "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True)
    path.chmod(0o600)
    return path


async def test_an_encrypted_key_is_refused_without_asking_anybody(
    tmp_path: Path, pair: tuple[Path, Path], locked: Path
) -> None:
    assert "(the key is encrypted)" in (await _refusal(tmp_path, (pair[0], locked), _file(tmp_path, TOKEN))).text


async def test_a_picture_as_a_certificate_is_called_what_it_is(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    picture = tmp_path / "server.jpg"
    picture.write_bytes(b"\xff\xd8\xff\xe0 a picture")
    refused = await _refusal(tmp_path, (picture, pair[1]), _file(tmp_path, TOKEN))
    assert "(admin.certificate is no PEM file)" in refused.text


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("Bearer 0123456789abcdef", True),
        ("bearer 0123456789abcdef", True),
        (b"Bearer 0123456789abcdef", True),
        ("Basic 0123456789abcdef", False),
        ("0123456789abcdef", False),
        ("Bearer  0123456789abcdef", False),
        ("Bearer 0123456789abcdeF", False),
        ("Bearer ü123456789abcdef", False),
        ("Bearer", False),
        ("", False),
    ],
)
def test_only_the_whole_token_is_right(value: str | bytes, right: bool) -> None:
    assert TokenCheck(TOKEN)._is_right(value) is right
