"""`make bench-gpu`: what the device does for a network alone, in the worker's runner and behind the whole server.

Two networks (the default one, and one of ResNet-50's size), FP16 and FP32, with and without CUDA graphs: images per
second, memory, agreement, the device's idle share and how much of the copies runs beside compute. Then `headrace serve`
with the same networks: JPEGs, one a call, and raw pixels, one batch a call.

Without a GPU it measures nothing. `--device cpu` proves that it runs; its figures mean nothing and are not written.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import gpu_report
from bench.contestants import ROOT, Contestant, headrace
from bench.gpu_facts import busy_share
from bench.photo import photo
from protos.headrace.v1 import inference_pb2 as pb
from protos.inference import grpc_service_pb2 as oip
from shared.repository import Meta
from shared.repository_writer import add_version

NETWORKS = ("efficientnet", "resnet50")
NO_GPU = "bench-gpu needs a CUDA device, and torch sees none on this machine: nothing was measured or written."
PREDICT, INFER = "/headrace.v1.Inference/Predict", "/inference.GRPCInferenceService/ModelInfer"
_LIKE_PIXELS = "  mean: [127, 127, 127]\n  std: [128, 128, 128]\n  classes: 1000\n"
SERVER_ROWS = 32
JPEGS_IN_FLIGHT, BATCHES_IN_FLIGHT = 256, 8


class Size(NamedTuple):
    """How much is measured."""

    device: str
    seconds: float
    rows: tuple[int, ...]
    pixels: int


def main() -> int:
    """Measure, print, and write where there is a GPU. The exit code is 1 where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="`cpu`: only to see that it runs (default: cuda)")
    parser.add_argument("--seconds", type=float, default=4.0, help="per figure (default: 4)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64], help="batch sizes")
    parser.add_argument("--pixels", type=int, default=224, help="height and width (default: 224)")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    given = parser.parse_args()
    on_gpu = given.device != "cpu"
    if on_gpu and not _has_gpu():
        print(NO_GPU)
        return 1
    size = Size(given.device, given.seconds, tuple(given.rows), given.pixels)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        repositories = {network: made(Path(folder, network), network, size) for network in given.networks}
        loops = [_loop(repositories[what[0]], size, *what) for what in _runs(given.networks, on_gpu=on_gpu)]
        served = [one for network in given.networks for one in _through(repositories[network], size, network)]
    text = gpu_report.tables(loops, served, _facts(size))
    print(text)
    if on_gpu:
        gpu_report.write(ROOT, text, {"loops": loops, "served": served, "facts": _facts(size)})
    return 0


def _has_gpu() -> bool:
    import torch  # noqa: PLC0415 - this process computes nothing

    return bool(torch.cuda.is_available())


def _runs(networks: list[str], *, on_gpu: bool) -> Iterator[tuple[str, str, bool]]:
    """Network, precision, with graphs."""
    for network in networks:
        if on_gpu:
            yield from ((network, "fp16", True), (network, "fp16", False))
        yield (network, "fp32", True)


def made(folder: Path, network_name: str, size: Size) -> Path:
    """A repository with two models of a network: a classifier of images, and one over raw pixels."""
    import safetensors.torch  # noqa: PLC0415 - beside torch
    import torch  # noqa: PLC0415 - only to make weights

    from bench import gpu_networks  # noqa: PLC0415 - imports torch

    code = Path(gpu_networks.__file__).read_text(encoding="utf-8")
    for name in (network_name, f"{network_name}_pixels"):
        (folder / name).mkdir(parents=True)
        (folder / name / "gpu_networks.py").write_text(code, encoding="utf-8")
        (folder / name / "model.yaml").write_text(_model_yaml(name, size.pixels), encoding="utf-8")
        torch.manual_seed(0)
        network = getattr(gpu_networks, name)()
        if name.startswith("efficientnet"):
            trained = safetensors.torch.load_file(_trained())
            (network.network if name.endswith("_pixels") else network).load_state_dict(trained)
        weights = folder / "weights.safetensors"
        safetensors.torch.save_file(network.state_dict(), weights)
        add_version(folder, name, {weights.name: weights}, Meta(source="bench"), make_current=True)
        weights.unlink()
    return folder


def _trained() -> Path:
    """The default network's weights."""
    found = sorted((ROOT / "models" / "efficientnet-lite0" / "versions").glob("*/**/*.safetensors"))
    if not found:
        raise SystemExit("efficientnet-lite0 is not fetched: run 'headrace models fetch efficientnet-lite0' first")
    return found[0]


def _model_yaml(name: str, pixels: int) -> str:
    head = f"backend: torch\nnetwork: gpu_networks:{name}\n"
    if not name.endswith("_pixels"):
        return f"pipeline: image_classification\n{head}preprocessing:\n  size: {pixels}\n{_LIKE_PIXELS}"
    return (
        f"pipeline: tensor\n{head}preprocessing:\n"
        f"  inputs: [{{name: pixels, datatype: UINT8, shape: [{pixels}, {pixels}, 3]}}]\n"
        "  outputs: [{name: logits, datatype: FP32, shape: [1000]}]\n"
    )


def _loop(repository: Path, size: Size, network: str, precision: str, graphs: bool) -> dict[str, Any]:  # noqa: FBT001 - one line of a plan
    print(f"{network} {precision} {'with' if graphs else 'without'} graphs", file=sys.stderr)
    command = [sys.executable, "-m", "bench.gpu_loop", "--repository", str(repository), "--model", network]
    command += ["--device", size.device, "--precision", precision, "--seconds", str(size.seconds)]
    command += ["--rows", *map(str, size.rows)] + ([] if graphs else ["--no-graphs"])
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -------------------------------------------------------------------- through the server


def _through(repository: Path, size: Size, network: str) -> Iterator[dict[str, Any]]:
    """JPEGs one by one, then batches of raw pixels."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        jpeg, pixels = Path(folder, "jpeg"), Path(folder, "pixels")
        jpeg.write_bytes(pb.PredictRequest(model=network, inputs=[pb.Input(image=photo())]).SerializeToString())
        rows = min(SERVER_ROWS, max(size.rows))
        pixels.write_bytes(_pixels_request(f"{network}_pixels", rows, size.pixels))
        with headrace(repository) as server:
            for model, method, request, in_flight, images in (
                (network, PREDICT, jpeg, JPEGS_IN_FLIGHT, 1),
                (f"{network}_pixels", INFER, pixels, BATCHES_IN_FLIGHT, rows),
            ):
                in_flight = in_flight if size.device != "cpu" else 4  # noqa: PLW2901 - enough to see that it runs
                what = {"like": network, "input": "JPEG" if images == 1 else f"pixels, {images} a call"}
                yield {
                    **what,
                    "in_flight": in_flight,
                    **_load(server, model, method, request, (in_flight, size.seconds, images)),
                }


def _pixels_request(model: str, rows: int, pixels: int) -> bytes:
    tensor = oip.ModelInferRequest.InferInputTensor(name="pixels", datatype="UINT8", shape=[rows, pixels, pixels, 3])
    raw = bytes(range(256)) * (rows * pixels * pixels * 3 // 256 + 1)
    request = oip.ModelInferRequest(model_name=model, inputs=[tensor])
    request.raw_input_contents.append(raw[: rows * pixels * pixels * 3])
    return request.SerializeToString()


def _load(server: Contestant, model: str, method: str, request: Path, plan: tuple[int, float, int]) -> dict[str, float]:
    in_flight, seconds, images = plan
    command = [sys.executable, "-m", "bench.load", "--address", server.address, "--method", method, "--json"]
    command += ["--payload", str(request), "--in-flight", str(in_flight)]
    command += ["--warm-s", str(seconds / 2), "--window-s", str(seconds)]
    seen: list[tuple[float, float, float, float]] = []
    result: dict[str, Any] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as generator:
        for line in generator.stdout or ():
            said = json.loads(line)
            if said["event"] == "result":
                result = said
            else:
                seen.append((time.monotonic(), *_ran(server, model)))
    if generator.returncode or len(seen) != 2 or result.get("errors"):
        raise SystemExit(f"the load on {model} failed: {result.get('errors') or generator.returncode}")
    (from_s, busy, rows, batches), (to_s, busy_then, rows_then, batches_then) = seen
    return {
        "images_per_s": result["requests"] * images / result["window_s"],
        "p50_ms": result["p50_ms"],
        "p99_ms": result["p99_ms"],
        "busy": busy_share(busy, busy_then, to_s - from_s),
        "batch_rows": (rows_then - rows) / max(1.0, batches_then - batches),
    }


def _ran(server: Contestant, model: str) -> tuple[float, float, float]:
    """Nanoseconds of compute, rows and batches of a model so far."""
    with urllib.request.urlopen(f"http://{server.http}/v2/models/{model}/stats", timeout=10) as answer:
        return computed(json.loads(answer.read()))


def computed(stats: dict[str, Any]) -> tuple[float, float, float]:
    """Nanoseconds of compute, rows and batches, from the protocol's statistics."""
    sizes = stats["model_stats"][0].get("batch_stats", [])
    counts = [(float(size["compute_infer"]["count"]), float(size["batch_size"])) for size in sizes]
    busy_ns = sum(float(size["compute_infer"]["ns"]) for size in sizes)
    return busy_ns, sum(count * rows for count, rows in counts), sum(count for count, _ in counts)


def _facts(size: Size) -> str:
    import torch  # noqa: PLC0415 - this process computes nothing

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU, a trial run: figures mean nothing"
    size_words = f"{size.pixels} × {size.pixels} pixels, {size.seconds:g} s a figure"
    return f"Measured on {name}, torch {torch.__version__}, {size_words}."


if __name__ == "__main__":
    sys.exit(main())
