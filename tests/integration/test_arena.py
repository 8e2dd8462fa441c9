"""The arena between processes: the same memory, no name, no trace, and no signal when there is too little of it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.arena import Arena
from shared.supervision import Child

LIMIT_S = 20
MIB = 1 << 20

DOUBLE = """
import sys
from shared.arena import AttachedArena
from shared.tensors import SlotRef
fd, nbytes, source, target = map(int, sys.argv[1:5])
arena = AttachedArena.attach(fd, nbytes)
read = arena.array(SlotRef(source, 4000), "FP32", (1, 1000))
arena.array(SlotRef(target, 4000), "FP32", (1, 1000))[:] = read * 2
arena.close()
"""

TOO_LITTLE = """
import resource, sys
from shared.arena import Arena
from shared.errors import StartupError
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]),) * 2)
try:
    Arena.create(1 << 30)
except StartupError as error:
    print(error.text)
    sys.exit(int(error.exit_code))
"""


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(MIB)
    yield made
    made.close()


async def run_child(*argv: str, pass_fds: tuple[int, ...]) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    child = Child.spawn("child", [sys.executable, *argv], pass_fds=pass_fds)
    child.on_exit(loop, lambda _, code: ended.set_result(code))
    async with asyncio.timeout(LIMIT_S):
        return await ended


async def test_a_child_reads_and_writes_the_owners_slots(arena: Arena) -> None:
    source, target = arena.lease(4000), arena.lease(4000)
    assert source is not None
    assert target is not None
    np.frombuffer(source.view, "<f4")[:] = np.arange(1000)
    places = [str(number) for number in (arena.fd, arena.nbytes, source.ref.offset, target.ref.offset)]
    assert await run_child("-c", DOUBLE, *places, pass_fds=(arena.fd,)) == 0
    assert np.array_equal(np.frombuffer(target.view, "<f4"), np.arange(1000) * 2)


async def test_a_child_killed_while_it_holds_a_slot_frees_nothing_and_the_owner_frees_all(arena: Arena) -> None:
    slot = arena.lease(4000)
    assert slot is not None
    slot.lend("pool-0.1")
    slot.close()
    assert await run_child("-c", "import os; os.kill(os.getpid(), 9)", pass_fds=(arena.fd,)) == -9
    assert arena.stats().quarantined_bytes == 4096
    slot.give_back("pool-0.1")
    assert arena.stats() == (0, 0, MIB, MIB, 0)


def test_it_has_no_name_that_anyone_could_open_or_that_could_stay_behind(arena: Arena) -> None:
    assert str(Path(f"/proc/self/fd/{arena.fd}").readlink()).startswith("/memfd:headrace-arena (deleted)")
    assert not [path for path in Path("/dev/shm").iterdir() if "headrace" in path.name]
    assert not os.get_inheritable(arena.fd)


@pytest.mark.parametrize(("limit", "nbytes"), [("RLIMIT_FSIZE", 1 << 20), ("RLIMIT_AS", 1 << 29)])
def test_too_little_memory_is_exit_code_2_with_the_needed_size_and_never_a_signal(limit: str, nbytes: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOO_LITTLE, limit, str(nbytes)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("arena.budget_bytes needs 1073741824 bytes of shared memory")


def test_every_page_is_there_from_the_start(arena: Arena) -> None:
    assert os.fstat(arena.fd).st_blocks * 512 >= MIB
