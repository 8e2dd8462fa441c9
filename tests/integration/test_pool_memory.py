"""Unwritten memory never shows: a decoder that leaves some would show pixels of another caller's image."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.damage import CORPUS

ROOT = Path(__file__).parent.parent.parent
ROUNDS = 60

_HASHES = f"""
import hashlib
from shared import images
from shared.errors import InvalidInput
from tests.support.damage import CORPUS, damaged
images.configure(1_000_000)
for file in CORPUS:
    for seed in range({ROUNDS}):
        try:
            print(hashlib.sha256(images.decode(damaged(file, seed)).tobytes()).hexdigest())
        except InvalidInput:
            print("refused")
"""


def test_memory_that_no_decoder_wrote_is_never_part_of_an_image() -> None:
    """Fresh memory is filled with a different byte in each of two processes: what depends on it would differ."""
    outcomes = []
    for fill in ("17", "200"):
        environment = os.environ | {"MALLOC_PERTURB_": fill, "OPENCV_LOG_LEVEL": "SILENT"}
        done = subprocess.run(
            [sys.executable, "-c", _HASHES],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        outcomes.append(done.stdout.split())
    assert len(outcomes[0]) == ROUNDS * len(CORPUS)
    assert outcomes[0] == outcomes[1]
    assert sum(outcome != "refused" for outcome in outcomes[0]) > 50
