"""Runs test cases in a process of their own.

tritonclient brings message classes of the same full names as ours, and one process can't hold both.
"""

import importlib
import json
import os
import subprocess
import sys
from typing import Any

from tests.support.stack import ROOT


def run(module: str, function: str, *arguments: Any, limit_s: float = 60.0) -> Any:  # noqa: ANN401 - anything JSON has
    """Call `function` of `module` in a new process and give what it returns. Fails with the process's output."""
    command = [sys.executable, "-m", "tests.support.own_process", module, function, json.dumps(arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise AssertionError(f"{function}{arguments} ended with {done.returncode}:\n{done.stderr[-5000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    _, called_module, called, given = sys.argv
    sys.stdout.write(f"\n{json.dumps(getattr(importlib.import_module(called_module), called)(*json.loads(given)))}\n")
