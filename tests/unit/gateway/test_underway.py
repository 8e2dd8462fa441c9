from gateway.drops import Drops
from gateway.served import Terms
from gateway.underway import Coming, Underway
from shared.clock import FOREVER_S
from shared.pipeline import RawInput
from tests.support.gateway_parts import served

ITEMS = [RawInput(kind="text", data=b"abcd")] * 3


def test_an_item_takes_over_what_was_counted_for_it_and_who_never_begins_is_given_back() -> None:
    model, terms, drops = served(), Terms(FOREVER_S, 100), Drops()

    def counted() -> tuple[int, int]:
        return model.rows_in_flight, model.unprepared_items

    with Coming(model, terms, ITEMS):
        assert counted() == (3, 3)
        with Underway(model, 1, terms, drops) as first:
            assert counted() == (3, 3)
            first.prepared(0.001)
            assert counted() == (3, 2)
        assert counted() == (2, 2)
        late = Underway(model, 1, terms, drops)
        late.__enter__()
        assert counted() == (2, 2)
    assert counted() == (1, 1)
    late.__exit__(None, None, None)
    assert counted() == (0, 0)
    with Underway(model, 1, terms, drops):
        assert counted() == (1, 1)
    assert counted() == (0, 0)
