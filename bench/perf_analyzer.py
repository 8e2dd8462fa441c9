"""Runs perf_analyzer, Triton's own load generator, which comes as a binary inside tritonclient's wheel.

It links two libraries that are not everywhere: CUDA's, which it needs only for GPU memory, and a small one for base64.
Stand-ins are compiled in their place. Used by the benchmark and by the end-to-end test.
"""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

BINARY = Path(sys.executable).parent / "perf_analyzer"
LIMIT_S = 90.0
"""Far above any run here: one that takes longer hangs."""
_STAND_INS = {
    "libcudart.so.12": "\n".join(
        f"int cuda{name}(void) {{ return 1; }}"
        for name in ("Free", "GetErrorName", "GetErrorString", "IpcGetMemHandle", "Malloc", "Memcpy", "SetDevice")
    ),
    "libb64.so.0d": """
        int base64_encode_block(void) { return 0; }
        int base64_encode_blockend(void) { return 0; }
        void base64_init_encodestate(void) {}
        void base64_init_decodestate(void *state) {}
        static int value(char c) {
            if (c >= 'A' && c <= 'Z') return c - 'A';
            if (c >= 'a' && c <= 'z') return c - 'a' + 26;
            if (c >= '0' && c <= '9') return c - '0' + 52;
            return c == '+' ? 62 : c == '/' ? 63 : -1;
        }
        int base64_decode_block(const char *code, int length, char *plain, void *state) {
            int bits = 0, held = 0, written = 0;
            for (int n = 0; n < length; n++) {
                if (value(code[n]) < 0) continue;
                held = (held << 6 | value(code[n])) & 0xffff, bits += 6;
                if (bits >= 8) bits -= 8, plain[written++] = held >> bits;
            }
            return written;
        }
    """,
}
"""C sources. The first is never called; of the second, only what reads images out of `--input-data`."""


class Unavailable(Exception):
    """perf_analyzer can't start on this machine; the text says why."""


class Figures(NamedTuple):
    """What perf_analyzer reports of one run."""

    inferences_per_s: float
    p50_ms: float
    p99_ms: float


def libraries(folder: Path) -> str:
    """Compile the stand-ins into `folder`; the value of LD_LIBRARY_PATH for `run`. Raises Unavailable."""
    compiler = shutil.which("cc")
    if not BINARY.exists() or compiler is None:
        raise Unavailable(
            "perf_analyzer is not installed" if compiler else "no C compiler for perf_analyzer's libraries"
        )
    source, versions = folder / "source.c", folder / "versions"
    for library, code in _STAND_INS.items():
        source.write_text(code)
        versions.write_text(f"{library} {{ global: *; }};")
        script = [f"-Wl,--version-script={versions}"] if "cuda" in library else []
        subprocess.run([compiler, "-shared", "-fPIC", *script, "-o", folder / library, source], check=True)
    started = run(str(folder), "--version")
    if started.returncode not in {0, 99}:  # 99: it wants a model, too
        raise Unavailable(f"perf_analyzer can't start here: {started.stderr.strip()[:300]}")
    return str(folder)


def run(found: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """One run to its end; `found` is what `libraries` gave. Raises subprocess.TimeoutExpired."""
    environment = {**os.environ, "LD_LIBRARY_PATH": found}
    return subprocess.run(
        [str(BINARY), *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def figures(report: Path) -> Figures:
    """The one line of the report that `-f` wrote."""
    with report.open(newline="") as file:
        (line,) = csv.DictReader(file)
    return Figures(float(line["Inferences/Second"]), float(line["p50 latency"]) / 1e3, float(line["p99 latency"]) / 1e3)
