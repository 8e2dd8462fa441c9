import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from preprocess_pool.confine import CpuLimit


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_CPU)
    yield
    resource.setrlimit(resource.RLIMIT_CPU, before)


def test_the_limit_counts_from_what_the_process_has_used_already() -> None:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    cpu = CpuLimit(job_limit_ms=5_000)
    cpu.job()
    soft, still = resource.getrlimit(resource.RLIMIT_CPU)
    assert 5 + CpuLimit.MARGIN_S <= soft - time.process_time() <= 5 + CpuLimit.MARGIN_S + 1
    assert still == hard, "or it could not be raised for the next job"
    cpu.lift()
    assert resource.getrlimit(resource.RLIMIT_CPU) == (hard, hard)


HARD = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
from preprocess_pool.confine import CpuLimit
cpu = CpuLimit(60_000)
cpu.job()
print(resource.getrlimit(resource.RLIMIT_CPU))
cpu.lift()
print(resource.getrlimit(resource.RLIMIT_CPU))
"""


def test_a_limit_set_from_outside_stands() -> None:
    done = subprocess.run([sys.executable, "-c", HARD], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["(3, 3)", "(3, 3)"]
