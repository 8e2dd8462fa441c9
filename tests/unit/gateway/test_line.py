from gateway.line import SPARE, Line


class Waiter:
    def __init__(self, name: str) -> None:
        self.name = name
        self.left = False


def line_of(*names: str) -> tuple[Line[Waiter], list[Waiter]]:
    line: Line[Waiter] = Line(lambda waiter: waiter.left)
    waiters = [Waiter(name) for name in names]
    for number, waiter in enumerate(waiters):
        line.push((number,), waiter)
    return line, waiters


def test_the_smallest_rank_goes_first() -> None:
    line, _ = line_of("b", "c")
    line.push((-1,), Waiter("a"))
    order = []
    while (first := line.first()) is not None:
        order.append(first.name)
        line.pop()
    assert order == ["a", "b", "c"]
    assert not line


def test_who_has_left_does_not_count_and_is_never_served() -> None:
    line, waiters = line_of("a", "b", "c")
    waiters[0].left = waiters[2].left = True
    assert len(line) == 1
    assert line.first() is waiters[1]
    line.pop()
    assert line.first() is None


def test_a_line_that_nobody_serves_forgets_those_who_left() -> None:
    line, _ = line_of()
    stays = Waiter("stays")
    line.push((0,), stays)
    for number in range(10_000):
        gone = Waiter("gone")
        line.push((number + 1,), gone)
        gone.left = True
    assert len(line._entries) <= 2 + 2 * SPARE
    assert line.first() is stays
