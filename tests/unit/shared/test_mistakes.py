import msgspec
import pytest

from shared.mistakes import first_of, leaves, nearest, struct_sentence
from shared.pipeline import Config
from shared.settings import Settings


class _Inner(msgspec.Struct, forbid_unknown_fields=True):
    side: int = 1


class _Config(Config, frozen=True):
    size: int
    inner: _Inner = msgspec.field(default_factory=_Inner)


@pytest.mark.parametrize(
    ("given", "place", "words"),
    [
        ({"size": "x"}, ("p", "size"), "p.size: expected int, got str"),
        ({"size": 1, "siez": 1}, ("p", "siez"), "unknown key p.siez (did you mean size?)"),
        ({}, ("p",), "p.size is required"),
        ({"size": 1, "inner": {"side": None}}, ("p", "inner", "side"), "p.inner.side: expected int, got null"),
        ({"size": 1, "inner": {"sid": 1}}, ("p", "inner", "sid"), "unknown key p.inner.sid"),
    ],
)
def test_a_struct_complaint_names_the_key(given: dict[str, object], place: tuple[str, ...], words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(given, _Config)
    found, sentence = struct_sentence(caught.value, _Config, ("p",))
    assert found == place
    assert words in sentence


def test_nearest_knows_keys_in_the_wrong_group() -> None:
    known = leaves(Settings)
    assert nearest("pool.grpc_address", known) == " (did you mean gateway.grpc_address?)"
    assert nearest("stop_ms", known) == " (did you mean supervisor.stop_ms?)"
    assert nearest("qqqqq", known) == ""


def test_first_of_takes_the_lowest_line() -> None:
    assert first_of(["f:12: a", "f:3: b", "f:4: c"]) == "f:3: b (and 2 more mistakes)"
    assert first_of(["f:12: a"]) == "f:12: a"
    assert first_of(["VARIABLE: a", "x"]) == "VARIABLE: a (and 1 more mistake)"
