"""Serialised requests of three sizes, for the native service and the Open Inference Protocol."""

import cv2
import numpy as np

from bench.photo import photo
from protos.headrace.v1 import inference_pb2 as native
from protos.inference import grpc_service_pb2 as open_inference

METHODS = {
    "native": "/headrace.v1.Inference/Predict",
    "open-inference": "/inference.GRPCInferenceService/ModelInfer",
}
SIZES = ("short", "medium", "long")
IMAGES = {"short": 0.32, "medium": 1.0, "long": 3.2}
"""Edge lengths against 500×375: 160×120, 500×375, 1600×1200."""
FLOATS = {"short": 16, "medium": 4_096, "long": 150_528}
WORDS = {"short": 8, "medium": 64, "long": 512}
KINDS = ("image", "floats", "text")
FIT = f"""\
--input and --mix, in the sizes short, medium and long:

image      a JPEG of 160×120, 500×375 or 1600×1200 pixels, for models of images
floats     INPUT0, FP32, {", ".join(f"[1, {count}]" for count in FLOATS.values())}; the built-in `identity` and
           `simulated_slow` take the short one only: --mix short=1, which is the default of floats
text       {", ".join(map(str, WORDS.values()))} words, for models of text

The built-in `identity_bytes` and `add_sub` take none of these: write a request into a file, for --payload.
"""
"""Part of a command line's help."""


def image(size: str) -> bytes:
    """A JPEG; the medium one is the photo of every other page."""
    if size == "medium":
        return photo()
    decoded = cv2.imdecode(np.frombuffer(photo(), np.uint8), cv2.IMREAD_COLOR)
    if decoded is None:
        raise RuntimeError("OpenCV could not decode its own image")
    scaled = cv2.resize(decoded, None, fx=IMAGES[size], fy=IMAGES[size], interpolation=cv2.INTER_AREA)
    done, encoded = cv2.imencode(".jpg", scaled, [cv2.IMWRITE_JPEG_QUALITY, 90])
    if not done:
        raise RuntimeError("OpenCV could not encode the test image")
    return encoded.tobytes()


def request(protocol: str, kind: str, size: str, model: str) -> bytes:
    """One serialised request; `model` may be empty for the native service when only one is served."""
    build = _native if protocol == "native" else _open_inference
    return build(kind, size, model)


def _text(size: str) -> str:
    return " ".join(f"word{number}" for number in range(WORDS[size]))


def _native(kind: str, size: str, model: str) -> bytes:
    if kind == "image":
        given = native.Input(image=image(size))
    elif kind == "text":
        given = native.Input(text=_text(size))
    else:
        count = FLOATS[size]
        given = native.Input()
        given.tensors.tensors.add(name="INPUT0", datatype="FP32", shape=[1, count], data=bytes(4 * count))
    return native.PredictRequest(model=model, inputs=[given]).SerializeToString()


def _open_inference(kind: str, size: str, model: str) -> bytes:
    found = open_inference.ModelInferRequest(model_name=model)
    if kind == "floats":
        count = FLOATS[size]
        found.inputs.add(name="INPUT0", datatype="FP32", shape=[1, count])
        found.raw_input_contents.append(bytes(4 * count))
    else:
        content = image(size) if kind == "image" else _text(size).encode()
        found.inputs.add(name=kind, datatype="BYTES", shape=[1, 1])
        found.raw_input_contents.append(len(content).to_bytes(4, "little") + content)
    return found.SerializeToString()
