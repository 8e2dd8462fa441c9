"""The command line of `bench.load`: every option with its check, its help and its default."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from bench import arrivals, open_loop, payloads

IN_FLIGHT = 16
"""Of the closed loop."""
EXAMPLES = """\
examples:
  # 200 a second for ten seconds, as independent callers send
  python -m bench.load --phase poisson:rate=200,seconds=10 --deadline-ms 250

  # quiet, then a ramp into overload, then quiet; small and large images; the Open Inference Protocol
  python -m bench.load --protocol open-inference --model efficientnet-lite0 --mix short=5,medium=4,long=1 \\
      --phase constant:rate=20,seconds=2 --phase ramp:rate=50,to=1000,seconds=10 --phase constant:rate=20,seconds=2

  # bursts of 32, every call of the run into a file, the result as JSON
  python -m bench.load --phase bursts:rate=300,burst=32,seconds=10 --json --records calls.csv

  # closed loop, 64 in flight
  python -m bench.load --in-flight 64 --window-s 5
"""


def parser(description: str) -> argparse.ArgumentParser:
    """The command line, with this text above its options."""
    found = argparse.ArgumentParser(
        prog="python -m bench.load",
        description=description,
        epilog=f"{payloads.FIT}\n{arrivals.__doc__}\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--address", type=_address, default="127.0.0.1:8001", help="host:port (default: %(default)s)")
    found.add_argument("--json", action="store_true", help="lines of JSON instead of a table (default: off)")
    what = found.add_argument_group("what is sent")
    what.add_argument(
        "--protocol", choices=sorted(payloads.METHODS), default="native", help="which service (default: %(default)s)"
    )
    what.add_argument(
        "--model", default="", help="default: none, which the native service takes when it serves a single model"
    )
    what.add_argument(
        "--input",
        choices=payloads.KINDS,
        default="image",
        help="see below what fits which model (default: %(default)s)",
    )
    what.add_argument(
        "--mix", type=_mix, metavar="SIZE=WEIGHT,...",
        help="sizes of the open loop, see below; the closed loop sends the first (default: medium=1; floats: short=1)",
    )  # fmt: skip
    what.add_argument(
        "--payload", type=_payload, metavar="FILE", help="a serialised request, instead of the above (default: none)"
    )
    what.add_argument(
        "--method", help="full name, e.g. /headrace.v1.Inference/Predict, for --payload (default: that of --protocol)"
    )
    opened = found.add_argument_group("open loop")
    opened.add_argument(
        "--phase", action="append", type=_phase, default=[], metavar="KIND:rate=N,seconds=N",
        help="see below; may be repeated (default: none, which is the closed loop)",
    )  # fmt: skip
    opened.add_argument(
        "--deadline-ms", type=_above_0, default=1000.0, help="from the planned time (default: %(default)g)"
    )
    opened.add_argument("--channels", type=_count, default=1, help="connections (default: %(default)s)")
    opened.add_argument("--seed", type=int, default=1, help="of arrivals and sizes (default: %(default)s)")
    opened.add_argument(
        "--wire", choices=sorted(open_loop.WIRES), default="grpc",
        help="grpc.aio, or bare frames for half of its CPU (default: %(default)s)",
    )  # fmt: skip
    opened.add_argument("--stages", action="store_true", help="with the server's time in each stage (default: off)")
    opened.add_argument("--records", type=_writable, help="write every call as a line of CSV (default: none)")
    opened.add_argument(
        "--first",
        action="store_true",
        help="send before other processes run, so that planned times are kept on a machine that is shared with the "
        "server; needs the right to, and does without (default: off)",
    )
    closed = found.add_argument_group("closed loop")
    closed.add_argument("--in-flight", type=_count, help=f"calls at one time (default: {IN_FLIGHT})")
    closed.add_argument(
        "--warm-s", type=_from_0, default=0.5, help="seconds of load before the window (default: %(default)g)"
    )
    closed.add_argument("--window-s", type=_above_0, default=3.0, help="seconds that count (default: %(default)g)")
    return found


def arguments(description: str, given: Sequence[str] | None = None) -> argparse.Namespace:
    """The checked arguments. Exits with a sentence and code 2 when they make no sense."""
    line = parser(description)
    found = line.parse_args(given)
    if found.phase and found.in_flight is not None:
        line.error("--in-flight is the closed loop's and --phase the open loop's: give one of them")
    found.in_flight = found.in_flight or IN_FLIGHT
    found.mix = found.mix or {"short" if found.input == "floats" else "medium": 1.0}
    return found


def _phase(text: str) -> arrivals.Phase:
    try:
        phase = arrivals.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not phase.calls:
        raise argparse.ArgumentTypeError(f"{text!r} has no calls: its rate and its seconds must be above 0")
    return phase


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} must be host:port")
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def _from_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, not below 0")
    return number


def _above_0(text: str) -> float:
    if not (number := _from_0(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return number


def _payload(text: str) -> dict[str, bytes]:
    """What the file holds, by its name."""
    try:
        return {Path(text).name: Path(text).read_bytes()}
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} can't be read: {error.strerror}") from None


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file in a folder that exists")
    return path


def _mix(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        size, _, weight = part.partition("=")
        try:
            found[size] = float(weight or 1)
        except ValueError:
            found[size] = -1.0
        if size not in payloads.SIZES or not 0 < found[size] < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{part!r} must be one of {', '.join(payloads.SIZES)}, =, a weight above 0"
            )
    return found
