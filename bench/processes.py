"""CPU seconds of a server's process tree, summed by what each process is."""

import psutil

ALONE = "one process"
"""Role of a contestant that is a single process."""


def role_of(command: list[str]) -> str:
    """What a process is, from its command line."""
    words = " ".join(command)
    if "preprocess_pool" in words:
        return "pool"
    if "-m gateway" in words:
        return "gateway"
    if "-m workers" in words:
        return "worker"
    return "supervisor" if "serve" in command else ALONE


def cpu_s_by_role(root: psutil.Process) -> dict[str, float]:
    """User + system seconds so far, of all living processes of the tree, by role."""
    total: dict[str, float] = {}
    for process in (root, *root.children(recursive=True)):
        try:
            with process.oneshot():
                times, role = process.cpu_times(), role_of(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        total[role] = total.get(role, 0.0) + times.user + times.system
    return total


def rss_mb(root: psutil.Process) -> float:
    """Resident memory of the tree in MB, shared pages counted once a process."""
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6


def private_mb(root: psutil.Process) -> float:
    """Memory of the tree in MB that no other process shares: without the arena and the libraries' code."""
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            memory = process.memory_info()
        except psutil.NoSuchProcess:
            continue
        total += memory.rss - memory.shared
    return total / 1e6
