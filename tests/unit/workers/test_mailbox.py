import select

from workers.mailbox import Mailbox


def readable(box: Mailbox[int]) -> bool:
    poller = select.poll()
    poller.register(box.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def test_mail_wakes_the_loop_once_and_is_taken_in_order() -> None:
    box: Mailbox[int] = Mailbox()
    assert not readable(box)
    assert box.taken() == []
    box.put(1)
    box.put(2)
    assert readable(box)
    assert box.taken() == [1, 2]
    assert not readable(box)


def test_a_ring_wakes_the_loop_though_there_is_nothing() -> None:
    box: Mailbox[int] = Mailbox()
    box.ring()
    assert readable(box)
    assert box.taken() == []
    assert not readable(box)


def test_who_waits_for_one_leaves_the_bell_to_the_loop() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    assert box.next() == 1
    assert box.taken() == [], "the bell says no more than: look"
