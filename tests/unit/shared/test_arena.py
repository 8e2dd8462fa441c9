import itertools
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import arena as arena_module
from shared.arena import Arena, AttachedArena
from shared.errors import ExitCode, StartupError
from shared.tensors import SlotRef

MIB = 1024 * 1024


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(MIB)
    yield made
    made.close()


def test_a_slot_is_exactly_as_long_as_asked_and_writable(arena: Arena) -> None:
    with arena.lease(150_528) or pytest.fail("no room") as slot:
        assert slot.ref.nbytes == len(slot.view) == 150_528
        slot.view[:3] = b"abc"
        assert bytes(arena.memory[slot.ref.offset : slot.ref.offset + 3]) == b"abc"
        assert arena.stats().leased_bytes == 256 * 1024
    assert arena.stats() == (0, 0, MIB, MIB, 0)


def test_the_budget_is_rounded_up_to_a_power_of_two() -> None:
    arena = Arena.create(3 * MIB)
    assert arena.nbytes == 4 * MIB
    arena.close()


def test_no_room_is_none_and_never_an_error(arena: Arena) -> None:
    assert arena.lease(MIB + 1) is None
    slots = [arena.lease(256 * 1024) for _ in range(4)]
    assert all(slots)
    assert arena.lease(1) is None
    for slot in slots:
        assert slot is not None
        slot.close()
    assert arena.lease(MIB) is not None


def test_close_is_idempotent_and_ends_the_view(arena: Arena) -> None:
    slot = arena.lease(10)
    assert slot is not None
    view = slot.view
    slot.close()
    slot.close()
    assert arena.stats().slots == 0
    with pytest.raises(ValueError, match="released"):
        view[0]
    with pytest.raises(ValueError, match="closed"):
        slot.view  # noqa: B018 - the property raises


def test_a_slot_closes_though_an_array_still_reads_it(arena: Arena) -> None:
    slot = arena.lease(16)
    assert slot is not None
    array = np.frombuffer(slot.view, np.uint8)
    slot.close()
    assert array.shape == (16,)
    assert arena.stats().slots == 0


def test_a_lent_slot_is_quarantined_until_the_last_answer(arena: Arena) -> None:
    slot = arena.lease(4096)
    assert slot is not None
    slot.lend("pool-0")
    slot.lend("worker-0")
    slot.lend("worker-0")
    slot.close()
    assert arena.stats()[:2] == (0, 4096)
    for holder in ("pool-0", "worker-0"):
        slot.give_back(holder)
        assert arena.stats().quarantined_bytes == 4096, repr(slot)
    slot.give_back("worker-0")
    assert arena.stats() == (0, 0, MIB, MIB, 0)


def test_an_answer_of_one_who_holds_nothing_frees_nothing(arena: Arena) -> None:
    slot = arena.lease(4096)
    assert slot is not None
    slot.give_back("nobody")
    slot.lend("pool-0")
    slot.close()
    slot.give_back("nobody")
    assert arena.stats().quarantined_bytes == 4096
    slot.give_back("pool-0")
    slot.give_back("pool-0")
    assert arena.stats().slots == 0
    assert repr(slot) == "<Slot 0+4096 closed holders=[]>"


def test_given_back_before_close_is_freed_at_close(arena: Arena) -> None:
    slot = arena.lease(4096)
    assert slot is not None
    slot.lend("pool-0")
    slot.give_back("pool-0")
    assert arena.stats().leased_bytes == 4096
    slot.close()
    assert arena.stats().slots == 0


Step = tuple[str, int, int]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(["lease", "close", "lend", "back"]), st.integers(0, 99), st.integers(0, MIB)))
)
def test_slots_in_use_or_quarantine_never_overlap_and_all_comes_back(steps: list[Step]) -> None:
    arena = Arena.create(MIB)
    slots, lent = [], []
    for what, pick, nbytes in steps:
        if what == "lease":
            slot = arena.lease(nbytes)
            if slot is not None:
                slots.append(slot)
        elif what == "close" and slots:
            slots.pop(pick % len(slots)).close()
        elif what == "lend" and slots:
            lent.append(slots[pick % len(slots)])
            lent[-1].lend("worker-0")
        elif what == "back" and lent:
            lent.pop(pick % len(lent)).give_back("worker-0")
        spans = sorted((slot.ref.offset, slot.ref.nbytes) for slot in {*slots, *lent})
        for (first, length), (second, _) in itertools.pairwise(spans):
            assert first + length <= second
        assert sum(arena.stats()[:3]) == MIB
    for slot in slots:
        slot.close()
    for slot in lent:
        slot.give_back("worker-0")
    assert arena.stats() == (0, 0, MIB, MIB, 0)
    arena.close()


def test_too_little_memory_is_a_start_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "available_bytes", lambda: 1000)
    with pytest.raises(StartupError, match=r"arena\.budget_bytes needs 1048576 bytes .*1000 are available") as caught:
        Arena.create(MIB)
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS


def test_a_full_device_is_a_start_error_and_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a kernel folder
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StartupError, match="ENOSPC"):
        Arena.create(MIB)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above


def test_attached_arrays_are_the_owners_memory(arena: Arena) -> None:
    attached = AttachedArena.attach(arena.fd, arena.nbytes)
    slot = arena.lease(100)
    assert slot is not None
    array = attached.array(slot.ref, "FP32", (1, 25))
    array[:] = 1.5
    assert np.array_equal(np.frombuffer(slot.view, "<f4"), np.full(25, 1.5, np.float32))
    attached.close()  # with an array alive
    assert array[0, 0] == 1.5
    del array
    attached.close()


@pytest.mark.parametrize(
    ("ref", "shape"),
    [
        (SlotRef(-4096, 4096), (1,)),
        (SlotRef(MIB, 1), (1,)),
        (SlotRef(MIB - 4, 8), (1,)),
        (SlotRef(0, 4), (2,)),
        (SlotRef(0, MIB), (1 << 62, 1 << 62)),
        (SlotRef(0, 100), (-1, -5)),
        (SlotRef(0, -5), (0,)),
    ],
)
def test_what_lies_outside_is_refused(arena: Arena, ref: SlotRef, shape: tuple[int, ...]) -> None:
    attached = AttachedArena.attach(arena.fd, arena.nbytes)
    with pytest.raises(ValueError, match=r"outside|needs"):
        attached.array(ref, "FP32", shape)
    attached.close()


def test_only_the_sealed_memory_of_the_right_size_is_attached(arena: Arena) -> None:
    with pytest.raises(ValueError, match="expected 8192"):
        AttachedArena.attach(arena.fd, 4096)
    unsealed = os.memfd_create("test")
    os.ftruncate(unsealed, 8192)
    with pytest.raises(ValueError, match="not sealed"):
        AttachedArena.attach(unsealed, 4096)
    os.close(unsealed)


def test_the_arena_can_neither_shrink_nor_grow(arena: Arena) -> None:
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_close_is_idempotent() -> None:
    arena = Arena.create(MIB)
    arena.close()
    arena.close()
    assert arena.fd == -1
