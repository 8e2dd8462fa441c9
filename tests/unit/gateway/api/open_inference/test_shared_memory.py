"""Regions on real POSIX shared memory objects: bounds, names, truncation, and who keeps an object open."""

import os
import secrets
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory as Object
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.open_inference.model import Parameters
from gateway.api.open_inference.shared_memory import MAX_REGIONS, OFFSET, REGION, SIZE, RegionStatus, SharedMemory
from shared.errors import HeadraceError, InvalidInput, TooLarge, UnknownRegion, Unsupported

PREFIX = f"headrace-test-{secrets.token_hex(4)}-"
SHM = Path("/dev/shm")
PAGE = 4096


@pytest.fixture
def shm() -> Iterator[Object]:
    """An object of one page; byte n is n % 256."""
    one = Object(f"{PREFIX}a", create=True, size=PAGE)
    one.buf[:] = bytes(n % 256 for n in range(PAGE))
    yield one
    one.close()
    one.unlink()


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    one = SharedMemory(PREFIX, 1 << 20)
    yield one
    one.close()


def registered(memory: SharedMemory, shm: Object, offset: int = 0, nbytes: int = PAGE, name: str = "r") -> SharedMemory:
    memory.register(RegionStatus(name, f"/{shm.name}", offset, nbytes))
    return memory


def at(nbytes: int, offset: int | None = None, region: str = "r") -> Parameters:
    return {REGION: region, SIZE: nbytes} | ({} if offset is None else {OFFSET: offset})


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_reading_and_writing_in_a_region_that_begins_inside_the_object(memory: SharedMemory, shm: Object) -> None:
    registered(memory, shm, offset=100, nbytes=200)

    with memory.place("input 'x'", at(4, 10)) as place:
        assert place.read() == bytes([110, 111, 112, 113])
        place.write(memoryview(b"ABC"))
    assert bytes(shm.buf[110:114]) == b"ABC" + bytes([113])


@given(st.integers(0, 2**64 - 1) | st.integers(0, 300), st.integers(0, 2**64 - 1) | st.integers(0, 300))
def test_a_place_lies_inside_its_region_or_is_refused(offset: int, nbytes: int) -> None:
    one = Object(f"{PREFIX}h", create=True, size=PAGE)
    memory = registered(SharedMemory(PREFIX, 1 << 20), one, nbytes=200)
    try:
        if offset + nbytes <= 200:
            with memory.place("input 'x'", at(nbytes, offset)) as place:
                assert len(place.read()) == nbytes
        else:
            with pytest.raises(InvalidInput, match="beyond region 'r', which has 200"):
                memory.place("input 'x'", at(nbytes, offset))
    finally:
        memory.close()
        one.close()
        one.unlink()


@pytest.mark.parametrize(
    "parameters",
    [
        {REGION: "r"},
        {REGION: 1, SIZE: 4},
        {REGION: "r", SIZE: -1},
        {REGION: "r", SIZE: "4"},
        {REGION: "r", SIZE: True},
        {REGION: "r", SIZE: 4, OFFSET: -1},
        {REGION: "r", SIZE: 4, OFFSET: 0.0},
    ],
)
def test_parameters_of_the_wrong_kind_are_refused(memory: SharedMemory, shm: Object, parameters: Parameters) -> None:
    registered(memory, shm)
    with pytest.raises(InvalidInput, match="input 'x': parameter shared_memory_"):
        memory.place("input 'x'", parameters)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (RegionStatus("r", PREFIX + "a", 0, PAGE + 1), InvalidInput),
        (RegionStatus("r", PREFIX + "a", PAGE, 1), InvalidInput),
        (RegionStatus("r", PREFIX + "a", 2**64 - 1, 2**64 - 1), InvalidInput),
        (RegionStatus("r", PREFIX + "a", 0, 0), InvalidInput),
        (RegionStatus("", PREFIX + "a", 0, 1), InvalidInput),
        (RegionStatus("x" * 129, PREFIX + "a", 0, 1), InvalidInput),
        (RegionStatus("r", PREFIX + "missing", 0, 1), UnknownRegion),
        (RegionStatus("r", "other", 0, 1), InvalidInput),
        (RegionStatus("r", "", 0, 1), InvalidInput),
        (RegionStatus("r", f"//{PREFIX}a", 0, 1), InvalidInput),
        (RegionStatus("r", f"{PREFIX}a/../../etc/passwd", 0, 1), InvalidInput),
        (RegionStatus("r", f"../shm/{PREFIX}a", 0, 1), InvalidInput),
        (RegionStatus("r", f"{PREFIX}a\0", 0, 1), InvalidInput),
        (RegionStatus("r", PREFIX + "x" * 100_000, 0, 1), InvalidInput),
    ],
)
def test_what_can_not_be_registered(
    memory: SharedMemory, shm: Object, status: RegionStatus, error: type[HeadraceError]
) -> None:
    before = descriptors()
    with pytest.raises(error) as caught:
        memory.register(status)
    assert len(caught.value.text) < 500
    assert descriptors() == before


def test_links_folders_and_pipes_are_no_objects(memory: SharedMemory, shm: Object) -> None:
    link, folder, pipe = (SHM / f"{PREFIX}{name}" for name in ("link", "folder", "pipe"))
    link.symlink_to(SHM / shm.name)
    folder.mkdir()
    os.mkfifo(pipe)
    before = descriptors()
    try:
        for path in (link, folder, pipe):
            with pytest.raises(InvalidInput):
                memory.register(RegionStatus("r", path.name, 0, 1))
    finally:
        link.unlink()
        folder.rmdir()
        pipe.unlink()
    assert descriptors() == before


def test_an_object_that_was_cut_meanwhile_is_one_refused_request_and_stays_as_short(
    memory: SharedMemory, shm: Object
) -> None:
    registered(memory, shm)
    path = SHM / shm.name
    with memory.place("input 'x'", at(8, 100)) as place:
        os.truncate(path, 104)
        with pytest.raises(InvalidInput, match="only 4 of 8 bytes"):
            place.read()
        with pytest.raises(InvalidInput, match="was cut"):
            place.write(b"12345678")
    assert path.stat().st_size == 104


def test_an_answer_larger_than_its_place_is_refused(memory: SharedMemory, shm: Object) -> None:
    registered(memory, shm)
    with memory.place("output 'y'", at(4)) as place, pytest.raises(InvalidInput, match=r"'y' has 5 bytes; .* has 4"):
        place.write(b"12345")
    assert shm.buf[0] == 0


def test_unregistering_lets_a_request_finish_and_closes_the_object_then(memory: SharedMemory, shm: Object) -> None:
    before = descriptors()
    registered(memory, shm)
    with memory.place("input 'x'", at(1)) as place:
        memory.unregister("r")
        with pytest.raises(UnknownRegion):
            memory.place("input 'x'", at(1))
        registered(memory, shm)  # the name is free again
        assert place.read() == b"\0"
    memory.unregister("")
    assert descriptors() == before
    assert memory.status("") == []


def test_unregistering_what_is_unknown_is_fine_and_its_status_is_not(memory: SharedMemory) -> None:
    memory.unregister("nothing")
    with pytest.raises(UnknownRegion, match="'nothing'"):
        memory.status("nothing")


def test_a_name_is_registered_once_and_regions_are_bounded(memory: SharedMemory, shm: Object) -> None:
    registered(memory, shm)
    with pytest.raises(InvalidInput, match="already"):
        registered(memory, shm)
    memory._regions |= {str(number): memory._regions["r"] for number in range(MAX_REGIONS)}
    with pytest.raises(TooLarge, match=str(MAX_REGIONS)):
        registered(memory, shm, name="one more")


def test_one_tensor_is_no_larger_than_a_message_may_be(shm: Object) -> None:
    small = registered(SharedMemory(PREFIX, 100), shm)
    with pytest.raises(TooLarge, match=r"101 bytes; the limit is 100 \(gateway.max_message_bytes\)"):
        small.place("input 'x'", at(101))
    small.close()


def test_a_slash_allows_every_object_but_still_one_name_below_the_folder(shm: Object) -> None:
    every = registered(SharedMemory("/", 100), shm)
    assert every.is_on
    with pytest.raises(InvalidInput):
        every.register(RegionStatus("x", "../etc/passwd", 0, 1))
    every.close()


def test_off_means_off() -> None:
    off = SharedMemory("", 100)
    assert not off.is_on
    with pytest.raises(Unsupported):
        off.register(RegionStatus("r", "k", 0, 1))
    with pytest.raises(Unsupported):
        off.unregister("")
    with pytest.raises(Unsupported):
        off.status("")
    with pytest.raises(UnknownRegion, match="switched off"):
        off.place("input 'x'", at(1))
    off.close()
