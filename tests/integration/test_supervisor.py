"""`headrace serve` over fake children: in this process with a stop of our own, and as a process with real signals."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from headrace import supervisor
from headrace.supervisor import Command, Supervisor, _Kept
from shared.child import StopSignal
from shared.errors import ExitCode, StartupError
from shared.runtime_dir import RuntimeDir
from shared.settings import Settings, SupervisorSettings, WorkerSettings
from tests.support.fake_serve import FAKE, commands

LIMIT_S = 20


class Asked(StopSignal):
    """A stop that the test asks for."""

    def ask(self) -> None:
        self._record(signal.SIGTERM, None)


class Running:
    """A supervisor in this process."""

    def __init__(self, kept: Sequence[Command], stop: Asked, **settings: int) -> None:
        self.ready: asyncio.Queue[tuple[str, int, bool]] = asyncio.Queue()
        self.stop = stop
        self.settings = SupervisorSettings(**{"backoff_first_ms": 10, **settings})
        self.supervisor = Supervisor(
            kept,
            self.settings,
            stop,
            lambda name, detail, first: self.ready.put_nowait((name, int(detail), first)),
        )
        self.task = asyncio.get_running_loop().create_task(self.supervisor.run())

    async def next_ready(self) -> tuple[str, int, bool]:
        async with asyncio.timeout(LIMIT_S):
            return await self.ready.get()

    async def all_ready(self) -> dict[str, int]:
        pair = [await self.next_ready(), await self.next_ready()]
        assert all(first for _, _, first in pair)
        return {name: pid for name, pid, _ in pair}

    async def exit_code(self) -> ExitCode:
        async with asyncio.timeout(LIMIT_S):
            return await self.task


@pytest.fixture
def stop() -> Iterator[Asked]:
    with Asked() as asked:
        yield asked


def gone(*pids: int) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


async def test_both_start_side_by_side_and_stop_in_order(stop: Asked, tmp_path: Path) -> None:
    running = Running(commands(tmp_path), stop)
    pids = await running.all_ready()
    assert set(pids) == {"gateway", "worker-0"}
    stop.ask()
    assert await running.exit_code() == ExitCode.OK
    assert (tmp_path / "log").read_text() == "gateway\nworker-0\n"
    assert gone(*pids.values())


@pytest.mark.parametrize("victim", ["gateway", "worker-0"])
async def test_a_killed_child_is_replaced_and_the_other_keeps_running(stop: Asked, tmp_path: Path, victim: str) -> None:
    running = Running(commands(tmp_path), stop)
    pids = await running.all_ready()
    os.kill(pids[victim], signal.SIGKILL)
    name, pid, first = await running.next_ready()
    assert (name, first) == (victim, False)
    assert pid != pids[victim]
    other = next(pid for name, pid in pids.items() if name != victim)
    assert not gone(other)
    stop.ask()
    assert await running.exit_code() == ExitCode.OK
    assert gone(other, pid)


async def test_a_child_that_someone_else_stopped_is_replaced_too(stop: Asked, tmp_path: Path) -> None:
    running = Running(commands(tmp_path), stop)
    pids = await running.all_ready()
    os.kill(pids["worker-0"], signal.SIGTERM)
    assert (await running.next_ready())[0] == "worker-0"
    stop.ask()
    assert await running.exit_code() == ExitCode.OK


@pytest.mark.parametrize("code", [ExitCode.BAD_SETTINGS, ExitCode.IN_USE, ExitCode.MODEL_LOAD])
async def test_a_hopeless_first_start_ends_everything_with_its_code(
    stop: Asked, tmp_path: Path, code: ExitCode
) -> None:
    running = Running(commands(tmp_path, "--fail", str(int(code))), stop)
    assert await running.exit_code() == code
    assert all(kept.child is None for kept in running.supervisor._kept)


async def test_a_hopeless_start_does_not_wait_for_processes_that_serve_nobody_yet(stop: Asked) -> None:
    kept = [
        Command("gateway", [*FAKE, "gateway", "--fail", "3"], 0),
        Command("worker-0", [*FAKE, "worker-0", "--stubborn"], 1),
    ]
    running = Running(kept, stop, stop_ms=60_000)
    assert await running.exit_code() == ExitCode.IN_USE


async def test_repeated_failures_give_up_with_70(stop: Asked, tmp_path: Path) -> None:
    running = Running(commands(tmp_path, "--fail", "72"), stop, max_failures=4, backoff_max_ms=20)
    assert await running.exit_code() == ExitCode.INTERNAL
    kept = running.supervisor._kept[0]
    assert kept.backoff.failures_in_a_row == 4
    assert all(kept.child is None for kept in running.supervisor._kept)


async def test_a_process_that_did_its_work_is_never_given_up(stop: Asked) -> None:
    """An input may end it again and again; the gateway learns to keep that away, and the others need it back."""
    running = Running([Command("worker-0", [*FAKE, "worker-0"], 1)], stop, max_failures=3, backoff_max_ms=20)
    for _ in range(6):
        _, pid, _ = await running.next_ready()
        os.kill(pid, signal.SIGKILL)
    await running.next_ready()
    stop.ask()
    assert await running.exit_code() == ExitCode.OK


async def test_a_worker_that_can_not_live_is_tried_on_while_another_one_serves(stop: Asked) -> None:
    """With a back-off of its own: the other one is not touched."""
    running = Running([Command("worker-0", [*FAKE, "worker-0"], 1)], stop, max_failures=3, backoff_max_ms=20)
    _, pid, _ = await running.next_ready()
    serving, broken = running.supervisor._kept[0], _Kept(Command("worker-1", ["/does/not/exist"], 1), running.settings)
    running.supervisor._kept.append(broken)
    often = asyncio.Event()
    failed = broken.backoff.failed

    def count(now_s: float) -> None:
        failed(now_s)
        if broken.backoff.failures_in_a_row == 6:
            often.set()

    broken.backoff.failed = count  # type: ignore[method-assign]  # to see it without a pause
    running.supervisor._start(broken)
    async with asyncio.timeout(LIMIT_S):
        await often.wait()
    assert serving.backoff.failures_in_a_row == 0
    assert not gone(pid)
    os.kill(pid, signal.SIGKILL)  # nobody serves for as long as it takes to start again
    assert await running.exit_code() == ExitCode.INTERNAL


async def test_workers_that_all_fail_are_given_up(stop: Asked) -> None:
    kept = [Command(f"worker-{index}", [*FAKE, f"worker-{index}", "--fail", "72"], 1) for index in range(2)]
    running = Running(kept, stop, max_failures=3, backoff_max_ms=20)
    assert await running.exit_code() == ExitCode.INTERNAL


def test_several_gateways_share_the_ports_that_are_held_for_them() -> None:
    two = Settings(gateway={"processes": 2, "grpc_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"})  # type: ignore[arg-type]  # as a file gives it
    ports = supervisor._shared_ports(two)
    assert ports is not None
    kept = supervisor._commands(None, two, ports)
    grpc, http = ports.addresses.values()
    assert "127.0.0.1:0" not in {grpc, http}
    assert [(command.name, command.argv[1:]) for command in kept[:2]] == [
        (name, ["-P", "-m", "gateway", "--index", str(index), "--grpc-address", grpc, "--http-address", http])
        for index, name in enumerate(["gateway", "gateway-1"])
    ]
    assert len({command.stop_order for command in kept[:2]}) == 1
    with pytest.raises(StartupError, match=r"gateway\.grpc_address .* it is in use") as caught:
        supervisor._shared_ports(Settings(gateway={"processes": 2, "grpc_address": grpc}))  # type: ignore[arg-type]  # as above
    assert caught.value.exit_code == ExitCode.IN_USE
    ports.close()
    assert supervisor._shared_ports(Settings()) is None


def test_as_many_workers_as_set_each_with_its_number() -> None:
    kept = supervisor._commands(Path("c.yaml"), Settings(worker=WorkerSettings(count=3)))
    assert [command.name for command in kept] == ["gateway", "worker-0", "worker-1", "worker-2"]
    assert [command.argv[1:] for command in kept[1:]] == [
        ["-P", "-m", "workers", "--index", str(index), "--config", "c.yaml"] for index in range(3)
    ]
    assert len({command.stop_order for command in kept[1:]}) == 1


async def test_a_program_that_can_not_be_started_is_tried_again_and_then_given_up(stop: Asked) -> None:
    running = Running([Command("gateway", ["/does/not/exist"], 0)], stop, max_failures=3, backoff_max_ms=20)
    assert await running.exit_code() == ExitCode.INTERNAL


async def test_settings_that_break_later_are_failures_and_not_an_end(stop: Asked, tmp_path: Path) -> None:
    """A child that was ready once: its exit code 2 may be a file in the middle of being edited."""
    marker = tmp_path / "second"
    script = (
        "import sys, pathlib, runpy\n"
        f"marker = pathlib.Path({str(marker)!r})\n"
        "broken = marker.exists()\n"
        "marker.touch()\n"
        "sys.argv[1:1] = ['gateway'] + (['--fail', '2'] if broken else [])\n"
        "runpy.run_module('tests.support.fake_child', run_name='__main__')\n"
    )
    kept = [Command("gateway", [sys.executable, "-c", script], 0)]
    running = Running(kept, stop, max_failures=3, backoff_max_ms=20)
    _, pid, _ = await running.next_ready()
    os.kill(pid, signal.SIGKILL)
    assert await running.exit_code() == ExitCode.INTERNAL


async def test_what_does_not_stop_in_time_is_killed(stop: Asked, tmp_path: Path) -> None:
    running = Running(commands(tmp_path, "--stubborn"), stop, stop_ms=300)
    pids = await running.all_ready()
    started_s = time.monotonic()
    stop.ask()
    assert await running.exit_code() == ExitCode.OK
    assert 0.3 <= time.monotonic() - started_s < 1.3
    assert gone(*pids.values())


async def test_a_second_request_kills_at_once(stop: Asked, tmp_path: Path) -> None:
    running = Running(commands(tmp_path, "--stubborn"), stop, stop_ms=60_000)
    pids = await running.all_ready()
    stop.ask()
    await asyncio.sleep(0)
    started_s = time.monotonic()
    stop.ask()
    assert await running.exit_code() == ExitCode.OK
    assert time.monotonic() - started_s < 1.0
    assert gone(*pids.values())


async def test_a_stop_while_a_child_is_still_starting(stop: Asked, tmp_path: Path) -> None:
    running = Running(commands(tmp_path, "--silent"), stop)
    stop.ask()
    assert await running.exit_code() == ExitCode.OK
    assert all(kept.child is None for kept in running.supervisor._kept)


async def test_a_stop_while_a_restart_is_due_starts_nothing_more(stop: Asked, tmp_path: Path) -> None:
    running = Running(commands(tmp_path), stop, backoff_first_ms=10_000)
    pids = await running.all_ready()
    os.kill(pids["gateway"], signal.SIGKILL)
    kept = running.supervisor._kept[0]
    async with asyncio.timeout(LIMIT_S):
        await kept.gone.wait()
    assert kept.restart is not None
    stop.ask()
    assert await running.exit_code() == ExitCode.OK
    assert kept.restart.cancelled()
    assert kept.child is None


@asynccontextmanager
async def serving(folder: Path, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, int]]]:
    """A supervisor as a process group of its own, and the pids of its children."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.fake_serve", str(folder), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        process_group=0,
    )
    assert process.stdout is not None
    pids: dict[str, int] = {}
    async with asyncio.timeout(LIMIT_S):
        while len(pids) < 2:
            _, name, pid = (await process.stdout.readline()).decode().split()
            pids[name] = int(pid)
    try:
        yield process, pids
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(LIMIT_S):
        return await process.wait()


async def test_ctrl_c_reaches_the_group_and_still_stops_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        assert await ended(process) == 0
    assert (tmp_path / "log").read_text() == "gateway\nworker-0\n"
    assert gone(*pids.values())


async def test_two_terms_end_it_within_a_second(tmp_path: Path) -> None:
    async with serving(tmp_path, "--stubborn") as (process, pids):
        process.terminate()
        process.send_signal(signal.SIGINT)
        started_s = time.monotonic()
        assert await ended(process) == 0
        assert time.monotonic() - started_s < 1.0
    assert gone(*pids.values())


async def test_sigkill_of_the_supervisor_takes_all_children_along(tmp_path: Path) -> None:
    async with serving(tmp_path, "--stubborn") as (process, pids):
        pidfds = [os.pidfd_open(pid) for pid in pids.values()]
        process.kill()
        await ended(process)
        for pidfd in pidfds:
            died = asyncio.Event()
            asyncio.get_running_loop().add_reader(pidfd, died.set)
            async with asyncio.timeout(2.0):
                await died.wait()
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A settings file with a runtime folder of its own, over fake children."""
    with TemporaryDirectory(prefix="hr-") as name:
        folder = Path(name)
        (folder / "headrace.yaml").write_text("runtime_dir: run\n")
        monkeypatch.setattr("shared.logs.configure", lambda *_: None)  # it would outlive this test
        monkeypatch.setattr(supervisor, "_commands", lambda *_: commands(folder, "--fail", "4"))
        yield folder


def test_serve_leaves_nothing_in_its_folder_and_passes_the_exit_code_on(site: Path) -> None:
    (site / "run" / "gateway-00000000000000ff").mkdir(parents=True)
    (site / "run").chmod(0o700)
    assert supervisor.run(site / "headrace.yaml") == ExitCode.MODEL_LOAD
    assert not (site / "run").exists()


def test_a_second_serve_is_in_use(site: Path) -> None:
    first = RuntimeDir.open(site / "run")
    first.lock("supervisor")
    with pytest.raises(StartupError, match=f"supervisor already runs in .* \\(pid {os.getpid()}\\)") as caught:
        supervisor.run(site / "headrace.yaml")
    assert caught.value.exit_code == ExitCode.IN_USE
    first.close()


def test_a_bug_in_the_supervisor_is_70(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: object) -> ExitCode:
        raise RuntimeError("a bug")

    monkeypatch.setattr(supervisor, "_supervise", broken)
    assert supervisor.run(site / "headrace.yaml") == ExitCode.INTERNAL
    assert not (site / "run").exists()
