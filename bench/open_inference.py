"""`make bench-open-inference`: perf_analyzer, which others wrote, against the whole server over gRPC and HTTP.

Three models: `identity` (16 floats in and out), the same with 602 KB in and out, and the default classifier with a
60 KB JPEG; 1, 4, 16 and 64 requests in flight. Beside them plain grpc.aio, from which the same perf_analyzer gets the
server's own recorded answer to every request: what gRPC for Python and the machine allow.
"""

import argparse
import base64
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil

from bench import perf_analyzer
from bench.contestants import ROOT, Contestant, echo, headrace, real_repository
from bench.open_inference_report import Row, write
from bench.photo import photo
from bench.processes import cpu_s_by_role, rss_mb
from bench.report import CLIENT
from headrace import builtin_models
from protos.inference import grpc_service_pb2 as pb
from shared.repository import Meta
from shared.repository_writer import add_version

CLASSIFIER = "efficientnet-lite0"
LARGE = "identity_602k"
LARGE_FLOATS = 150_528  # 3 × 224 × 224
IN_FLIGHT = (1, 4, 16, 64)
WINDOW_MS = 1_300
WINDOWS = 3  # perf_analyzer reports nothing from fewer
DISTURBED_CORES = 0.15
"""What other processes may use of the machine while a line is measured; above, it is measured again."""
TRIES = 3
NO_MORE_TRIES_S = 100
"""After the start: from here on every line is measured once, so that the whole stays below five minutes."""
ZEROS = ("--input-data", "zero")
"""Its random bits make a NaN of every 256th float, and denormals, which cost a CPU more."""
SERVICE = "inference.GRPCInferenceService"
_RECORDED = ("ServerLive", "ServerReady", "ServerMetadata")
_RECORDED_OF_MODEL = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")


class Load(NamedTuple):
    """What is sent to a model."""

    model: str
    request: pb.ModelInferRequest
    """Only to record an answer; perf_analyzer makes its own."""
    arguments: tuple[str, ...] = ()
    """More of perf_analyzer's, so that it sends the same."""


class Counts(NamedTuple):
    """Since the server started."""

    done: int
    failed: int = 0
    batches: int = 0


def main() -> None:
    """Run everything, print the table, write JSON and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["identity", LARGE, CLASSIFIER])
    parser.add_argument("--in-flight", nargs="+", type=int, default=IN_FLIGHT)
    parser.add_argument("--no-write", action="store_true", help="only print")
    given = parser.parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        try:
            bench = Bench(Path(folder))
        except perf_analyzer.Unavailable as why:
            raise SystemExit(str(why)) from None
        with headrace(repository(Path(folder))) as server:
            rows = [row for model in given.models for row in bench.model(server, model, given.in_flight)]
    command = (
        "make bench-open-inference"
        if len(sys.argv) == 1
        else " ".join(["python -m bench.open_inference", *sys.argv[1:]])
    )
    facts = {"command": command, "seconds": round(time.monotonic() - started_s), "windows": WINDOWS}
    facts |= {"window_ms": WINDOW_MS, "perf_analyzer": bench.perf_analyzer_command}
    write(rows, facts, folder=None if given.no_write else ROOT)
    if any(row.errors for row in rows):
        raise SystemExit(f"requests failed: {[(r.name, r.kind, r.in_flight, r.errors) for r in rows if r.errors]}")


def repository(folder: Path) -> Path:
    """The default classifier, the built-in models, and `identity` with 602 KB."""
    models = real_repository(folder, CLASSIFIER)
    builtin_models.fetch(models)
    config = builtin_models.CONFIGS["identity"].replace("[16]", f"[{LARGE_FLOATS}]")
    (models / LARGE).mkdir()
    (models / LARGE / "model.yaml").write_text(config)
    empty = folder / "builtin.json"
    empty.write_text("{}")
    add_version(models, LARGE, {empty.name: empty}, Meta(source="bench"), make_current=True)
    return models


class Bench:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        """Raises perf_analyzer.Unavailable."""
        self._folder = folder
        self._no_more_tries_s = time.monotonic() + NO_MORE_TRIES_S
        self._libraries = perf_analyzer.libraries(folder)
        image = photo()
        raw = len(image).to_bytes(4, "little") + image
        inputs = folder / "inputs.json"
        inputs.write_text(json.dumps({"data": [{"image": {"b64": base64.b64encode(raw).decode()}}]}))
        self._loads = {
            "identity": Load("identity", _infer("identity", "INPUT0", "FP32", 16, bytes(64)), ZEROS),
            LARGE: Load(LARGE, _infer(LARGE, "INPUT0", "FP32", LARGE_FLOATS, bytes(4 * LARGE_FLOATS)), ZEROS),
            CLASSIFIER: Load(CLASSIFIER, _infer(CLASSIFIER, "image", "BYTES", 1, raw), ("--input-data", str(inputs))),
        }
        self.perf_analyzer_command = ""

    def model(self, server: Contestant, model: str, in_flight: Iterable[int]) -> list[Row]:
        """One model through gRPC, HTTP and the echo, side by side at each number in flight."""
        load = self._loads[model]
        canned = self._folder / f"canned-{model}"
        canned.mkdir()
        _record(server, load, canned)
        rows = []
        with echo("--canned", canned) as plain:
            for calls in in_flight:
                print(f"{model}, {calls} in flight", file=sys.stderr)
                rows.append(self._row(server, "grpc", load, calls))
                rows.append(self._row(server, "http", load, calls))
                rows.append(self._row(plain, "echo", load, calls))
        return sorted(rows, key=lambda row: ("grpc", "http", "echo").index(row.name))

    def _row(self, server: Contestant, name: str, load: Load, calls: int) -> Row:
        """The least disturbed of a few runs; as a rule the first is not disturbed."""
        rows = [self._run(server, name, load, calls)]
        while (
            rows[-1].others_cores > DISTURBED_CORES and len(rows) < TRIES and time.monotonic() < self._no_more_tries_s
        ):
            rows.append(self._run(server, name, load, calls))
        return min(rows, key=lambda row: row.others_cores)

    def _run(self, server: Contestant, name: str, load: Load, calls: int) -> Row:
        """CPU and counts are read before and after it, so they cover its warm-up, too."""
        started_s, busy_s = time.monotonic(), _machine_cpu_s()
        before, cpu_before = _counts(server, load.model), {**cpu_s_by_role(server.process), CLIENT: _children_cpu_s()}
        figures = self._analyze(server, name, load, calls)
        after, cpu_after = _counts(server, load.model), {**cpu_s_by_role(server.process), CLIENT: _children_cpu_s()}
        spent = {role: after_s - cpu_before.get(role, 0.0) for role, after_s in cpu_after.items()}
        others_s = _machine_cpu_s() - busy_s - sum(spent.values())
        done = after.done - before.done
        batches = after.batches - before.batches
        return Row(
            name,
            load.model,
            calls,
            figures.inferences_per_s,
            figures.p50_ms,
            figures.p99_ms,
            {role: seconds * 1e3 / max(done, 1) for role, seconds in spent.items()},
            errors={"failed": after.failed - before.failed} if after.failed > before.failed else {},
            rss_mb=rss_mb(server.process),
            start_s=server.start_s,
            batch_rows=done / batches if batches and name != "echo" else 0.0,
            others_cores=others_s / (time.monotonic() - started_s),
        )

    def _analyze(self, server: Contestant, name: str, load: Load, calls: int) -> perf_analyzer.Figures:
        protocol, address = ("http", server.http) if name == "http" else ("grpc", server.address)
        report = self._folder / "report.csv"
        report.unlink(missing_ok=True)
        # Stable or not, what is reported is the mean of these windows. Synchronous, a thread per request in flight:
        # as fast as its asynchronous calls here, which would have the echo send every request's id back.
        common = ["-p", str(WINDOW_MS), "-r", str(WINDOWS), "-s", "1000", "--percentile", "50", "--sync"]
        arguments = ["-m", load.model, "-i", protocol, "--concurrency-range", str(calls), *common]
        self.perf_analyzer_command = f"perf_analyzer -m MODEL -i PROTOCOL --concurrency-range N {' '.join(common)}"
        done = perf_analyzer.run(self._libraries, "-u", address, *arguments, "-f", str(report), *load.arguments)
        if done.returncode or "Failed" in done.stdout or not report.exists():
            raise SystemExit(f"perf_analyzer failed with {arguments}: {(done.stdout + done.stderr)[-1500:]}")
        return perf_analyzer.figures(report)


def _infer(model: str, name: str, datatype: str, size: int, raw: bytes) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[1, size])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw])


def _call(server: Contestant, method: str, request: bytes) -> bytes:
    options = [("grpc.max_receive_message_length", 16 << 20), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        return call(request, timeout=perf_analyzer.LIMIT_S)


def _record(server: Contestant, load: Load, folder: Path) -> None:
    """The server's answers to all that perf_analyzer asks for, one file per method."""
    named = pb.ModelReadyRequest(name=load.model).SerializeToString()  # all four requests have the name as field 1
    requests = dict.fromkeys(_RECORDED, b"") | dict.fromkeys(_RECORDED_OF_MODEL, named)
    requests["ModelInfer"] = load.request.SerializeToString()
    for method, request in requests.items():
        (folder / method).write_bytes(_call(server, f"/{SERVICE}/{method}", request))


def _counts(server: Contestant, model: str) -> Counts:
    """What the server's own statistics say."""
    asked = pb.ModelStatisticsRequest(name=model).SerializeToString()
    answer = pb.ModelStatisticsResponse.FromString(_call(server, f"/{SERVICE}/ModelStatistics", asked))
    (counted,) = answer.model_stats
    return Counts(counted.inference_stats.success.count, counted.inference_stats.fail.count, counted.execution_count)


def _machine_cpu_s() -> float:
    """User and system time of everything that runs here."""
    spent = psutil.cpu_times()
    return spent.user + spent.system + spent.nice + spent.softirq


def _children_cpu_s() -> float:
    """Of perf_analyzer's runs so far: nothing else that this process started has ended in between."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
