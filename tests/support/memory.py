"""What processes take of the machine's memory, shared pages counted once."""

import re
from collections.abc import Iterable
from pathlib import Path

PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def proportional_bytes(pids: Iterable[int]) -> int:
    """Proportional set size of all of them together (Linux): a page that three of them share counts once."""
    return sum(int(PSS.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())[0]) * 1024 for pid in pids)
