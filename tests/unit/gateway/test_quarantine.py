import pytest

from gateway.quarantine import KEEP_S, MOST, Quarantine, digest_of
from shared.errors import ModelDisabled
from shared.pipeline import RawInput
from shared.tensors import RawTensor


def text(data: bytes) -> RawInput:
    return RawInput(kind="text", data=data)


def tensors(data: bytes, name: str = "x") -> RawInput:
    return RawInput(kind="tensors", tensors=(RawTensor(name, "UINT8", (1, len(data)), data),))


def test_an_input_is_held_for_its_time_and_its_model_only() -> None:
    quarantine = Quarantine()
    quarantine.add(digest_of(1, text(b"poison")), 100.0)
    with pytest.raises(ModelDisabled, match="ended two processes"):
        quarantine.check(1, text(b"poison"), 100.0 + KEEP_S - 1)
    quarantine.check(2, text(b"poison"), 100.0)
    quarantine.check(1, text(b"other"), 100.0)
    quarantine.check(1, text(b"poison"), 100.0 + KEEP_S)
    assert len(quarantine) == 0


def test_tensors_are_told_apart_by_all_that_they_are() -> None:
    quarantine = Quarantine()
    quarantine.add(digest_of(1, tensors(b"bad")), 0.0)
    for harmless in (tensors(b"good"), tensors(b"bad", name="y"), text(b""), text(b"bad")):
        quarantine.check(1, harmless, 1.0)
    with pytest.raises(ModelDisabled):
        quarantine.check(1, tensors(b"bad"), 1.0)


def test_what_has_ended_is_forgotten_though_nobody_asks_for_it() -> None:
    quarantine = Quarantine()
    quarantine.add(digest_of(1, text(b"poison")), 0.0)
    quarantine.check(1, text(b"something else"), KEEP_S + 1)
    assert len(quarantine) == 0


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    quarantine = Quarantine()
    digests = [digest_of(1, text(str(number).encode())) for number in range(MOST + 10)]
    for digest in digests:
        quarantine.add(digest, 0.0)
    assert len(quarantine) == MOST
    assert not quarantine.holds(digests[0], 1.0)
    assert quarantine.holds(digests[-1], 1.0)
