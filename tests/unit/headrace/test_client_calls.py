import contextlib
import os
import threading
from pathlib import Path

import grpc
import pytest

from headrace import client_calls as calls
from headrace.client_errors import InferenceError, Unavailable
from headrace.client_results import File, Tensor, Tensors, Text


def failure(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, retry_after_ms: int | None = 100) -> InferenceError:
    return Unavailable("later", code=code, reason="not_ready", retry_after_ms=retry_after_ms)


def test_an_image_may_be_a_path_or_bytes(tmp_path: Path) -> None:
    file = tmp_path / "cat.jpg"
    file.write_bytes(b"jpeg")

    for image in (file, str(file), b"jpeg", bytearray(b"jpeg"), memoryview(b"jpeg")):
        assert calls.wire_input(image).image == b"jpeg"


def test_text_and_tensors_are_inputs_too() -> None:
    tensor = Tensor("x", "UINT8", (1, 2), b"ab")

    assert calls.wire_input(Text("hello")).text == "hello"
    assert calls.wire_input(Tensors((tensor,))).tensors.tensors[0].shape == [1, 2]


def test_a_file_goes_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_bytes(b"#!/bin/sh")
    for given in (path, str(path), b"#!/bin/sh"):
        message = calls.wire_input(File(given))
        assert (message.file, message.image) == (b"#!/bin/sh", b"")
    with pytest.raises(FileNotFoundError):
        calls.wire_input(File(tmp_path / "none"))


def test_a_missing_file_is_an_oserror() -> None:
    with pytest.raises(FileNotFoundError):
        calls.wire_request(["/nowhere/cat.jpg"], {})


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_a_device_is_not_read(device: str) -> None:
    with pytest.raises(OSError, match="it is a device, not a file"):
        calls.read_image(device)


def test_a_pipe_is_read_to_its_end() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"):
        with os.fdopen(writing, "wb") as sender:
            sender.write(b"jpeg")
        assert calls.read_image(f"/dev/fd/{reading}") == b"jpeg"  # as /dev/stdin is one


def test_what_never_ends_is_given_up_at_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_IMAGE_BYTES", 1 << 20)
    endless = tmp_path / "pipe"
    os.mkfifo(endless)

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), endless.open("wb", buffering=0) as pipe:
            while True:
                pipe.write(b"x" * 65536)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    with pytest.raises(OSError, match="it has over 1 MiB, too much for one input"):
        calls.read_image(endless)
    writer.join(5)
    assert not writer.is_alive(), "the pipe was not closed"


def test_a_file_at_the_bound_is_read_and_one_above_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_IMAGE_BYTES", 1 << 20)
    file = tmp_path / "large.jpg"
    file.write_bytes(b"x" * (1 << 20))
    assert len(calls.read_image(file)) == 1 << 20
    file.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(OSError, match="it has over 1 MiB") as caught:
        calls.read_image(file)
    assert caught.value.filename == str(file)


def test_options_that_are_none_are_not_sent_and_unknown_ones_refused() -> None:
    assert not calls.wire_request([b"x"], {"top_k": None}).HasField("options")
    assert calls.wire_request([b"x"], {"top_k": 3}).options.top_k == 3
    with pytest.raises(ValueError, match="colour"):
        calls.wire_request([b"x"], {"colour": 3})


def test_waits_as_long_as_the_server_says_spread_over_a_quarter() -> None:
    waits = [calls.retry_wait_s(failure(), 1, 4, 10.0) for _ in range(50)]

    assert all(wait is not None and 0.1 <= wait <= 0.125 for wait in waits)
    assert len(set(waits)) > 1


@pytest.mark.parametrize(
    ("error", "attempt", "left_s"),
    [
        (failure(grpc.StatusCode.RESOURCE_EXHAUSTED), 1, 10.0),
        (failure(grpc.StatusCode.INTERNAL), 1, 10.0),
        (failure(retry_after_ms=None), 1, 10.0),
        (failure(), 4, 10.0),
        (failure(), 1, 0.05),
        (failure(), 1, -1.0),
    ],
    ids=["overloaded", "internal", "no pushback", "attempts spent", "no time for it", "late"],
)
def test_gives_up(error: InferenceError, attempt: int, left_s: float) -> None:
    assert calls.retry_wait_s(error, attempt, 4, left_s) is None


def test_a_time_limit_in_a_stream_is_never_0_which_means_the_default() -> None:
    assert calls.timeout_ms(0.0001) == 1
    assert calls.timeout_ms(1.5) == 1500


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:8001", True),
        ("[::1]:8001", True),
        ("localhost:8001", True),
        ("unix:/run/x.sock", True),
        ("10.0.0.1:8001", False),
        ("gpu.example.org:8001", False),
        ("dns:///gpu:8001", False),
    ],
)
def test_a_proxy_is_passed_by_only_for_this_machine(address: str, local: bool) -> None:
    assert (("grpc.enable_http_proxy", 0) in calls.channel_options(address)) == local
