"""`make stubs`: the wheel that other services install."""

import runpy
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
sys.path.append(sys.argv[2])
import headrace
assert headrace.__file__.startswith(sys.argv[1]), headrace.__file__
from headrace import AsyncClient, Client
from headrace.client_errors import InferenceError
loaded = {name.split(".")[0] for name in sys.modules}
print(sorted(loaded & {"torch", "numpy", "cv2", "pydantic", "msgspec", "structlog", "shared", "gateway", "workers"}))
"""


def test_the_wheel_has_the_client_and_the_stubs_and_needs_nothing_else(tmp_path: Path) -> None:
    build = runpy.run_path(str(ROOT / "deploy/client/build.py"))["main"]
    wheel = build(tmp_path / "dist")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(unpacked)
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    needs = [line.split(">=")[0] for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist")]
    libraries = sysconfig.get_paths()["purelib"]
    printed = subprocess.run(
        [sys.executable, "-I", "-c", CHECK, str(unpacked), libraries], check=True, capture_output=True, text=True
    ).stdout

    assert needs == ["Requires-Dist: grpcio", "Requires-Dist: protobuf"]
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"headrace", "protos"}
    assert {"headrace/client.py", "headrace/py.typed", "protos/headrace/v1/inference.proto"} <= set(names)
    assert not {name for name in names if "cli.py" in name or "supervisor" in name or "zoo" in name}
    assert printed == "[]\n"
