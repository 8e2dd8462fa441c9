import pytest

from bench.model_loads_report import Memory, Round, page, scheduling

ROUNDS = [Round(5.0, 10.0, 6.0, 12.0, 0, 4, 3.0), Round(5.0, 10.0, 6.0, 14.0, 1, 5, 2.5), Round(5, 10, 6, 11, 0, 4, 3)]


def test_a_ratio_is_of_one_run() -> None:
    assert [each.ratio for each in ROUNDS] == pytest.approx([1.2, 1.4, 1.1])


def test_the_page_has_command_median_range_failures_and_memory() -> None:
    text = page(ROUNDS, {"loads": {"worker": Memory(300.4, 310.2)}}, "make it", 7, "As it is.")
    assert "Written by `make it` in 7 s" in text
    assert "As it is." in text
    assert "median 1.20, range 1.10 to 1.40" in text
    assert "1 calls failed" in text
    assert ["2", "5.0", "10.0", "6.0", "14.0", "1.40", "1", "5", "2.5"] in _cells(text)
    assert ["loads", "worker", "300", "310", "+10"] in _cells(text)


def test_without_the_second_part_nothing_is_said_of_memory() -> None:
    assert "Memory" not in page(ROUNDS, {}, "make it", 7, "As it is.")


@pytest.mark.parametrize(
    ("autogroups", "groups", "own"),
    [
        ("off", "4:cpu,cpuacct:/\n", True),
        ("on", "4:cpu,cpuacct:/\n3:memory:/some\n", False),
        ("on", "4:cpu,cpuacct:/some\n3:memory:/\n", True),
        ("on", "0::/\n", False),
        ("on", "0::/system.slice/some.service\n", True),
    ],
)
def test_it_says_whether_priorities_hold(autogroups: str, groups: str, own: bool) -> None:
    assert ("control group of its own" in scheduling(autogroups, groups)) == own


def _cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
