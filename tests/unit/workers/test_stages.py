import pytest

from workers.stages import Stages


def test_a_stage_inside_another_one_is_no_part_of_it() -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 10.0, 11.0])
    stages = Stages(lambda: next(times))
    with stages("build"), stages("read"):
        pass
    with stages("warm_up"):
        pass
    assert stages.seconds == {"build": 1.0 + 4.0, "read": 2.0, "warm_up": 1.0}


def test_a_stage_that_fails_is_timed_and_over() -> None:
    times = iter([0.0, 1.0, 2.0, 4.0])
    stages = Stages(lambda: next(times))
    with pytest.raises(ValueError, match="no"), stages("read"):
        raise ValueError("no")
    with stages("build"):
        pass
    assert stages.seconds == {"read": 1.0, "build": 2.0}
