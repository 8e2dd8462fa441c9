"""The endpoints for plain uploads: what each is called, takes and answers."""

from typing import Any

from gateway.api.http_docs import BINARY, HOST, Operation, query_parameter
from gateway.api.upload import UploadTask
from shared.results import Classification, Detections, Embedding, Entities, Label

_TAG = "Plain upload"
_CONTENT = {
    "multipart/form-data": {
        "schema": {"type": "object", "properties": {"file": BINARY}, "required": ["file"]},
    },
    "application/octet-stream": {"schema": BINARY},
}
_BEFORE = (
    query_parameter("model", "string", "Needed only when several served models do this."),
    query_parameter("version", "string", "Default: the current one."),
)
_AFTER = (
    query_parameter("timeout_ms", "number", "Milliseconds; default gateway.default_deadline_ms."),
    query_parameter("routing_key", "string", "The same one goes to the same version while a canary has a share."),
    query_parameter("cache", "string", "bypass: computed anew."),
)
_SERVER = {
    "version": "0123456789abcdef",
    "request_id": "7f3a9c0100000001",
    "server_timing": {"prepare_ms": 2.1, "batch_ms": 0.2, "run_ms": 24.5, "batch_rows": 1},
}


def _label(label: Label) -> dict[str, Any]:
    return {"index": label.index, "name": label.name, "score": label.score}


def _labels(result: Classification) -> dict[str, Any]:
    return {"labels": [_label(one) for one in result.labels]}


def _boxes(result: Detections) -> dict[str, Any]:
    detections = [
        {"label": _label(one.label), "left": one.left, "top": one.top, "right": one.right, "bottom": one.bottom}
        for one in result.boxes
    ]
    return {"detections": detections, "width": result.width, "height": result.height}


def _vector(result: Embedding) -> dict[str, Any]:
    return {"embedding": result.values, "tokens": result.tokens, "truncated": result.truncated}


def _entities(result: Entities) -> dict[str, Any]:
    entities = [
        {"label": _label(one.label), "start": one.start, "end": one.end, "text": one.text} for one in result.entities
    ]
    return {"entities": entities, "truncated": result.truncated}


CLASSIFY = UploadTask(
    "Classify",
    Operation(
        "classify",
        "POST",
        ("/v1/classify",),
        _TAG,
        "Classify one image (or text)",
        "The upload is a form with one file (`-F file=@cat.jpg`), or the bytes themselves (`--data-binary @cat.jpg`). "
        "With `Content-Type: text/plain` they are text. Query parameters (or form fields) other than model, version, "
        "timeout_ms, routing_key and cache are options of the model, such as top_k.",
        f"-F file=@cat.jpg '{HOST}/v1/classify?top_k=3'",
        {
            "model": "efficientnet-lite0",
            "labels": [{"index": 281, "name": "tabby cat", "score": 0.83}],
            **_SERVER,
        },
        _CONTENT,
        (*_BEFORE, query_parameter("top_k", "integer", "How many labels, best first."), *_AFTER),
    ),
    Classification,
    "labels",
    _labels,
)
DETECT = UploadTask(
    "Detect",
    Operation(
        "detect",
        "POST",
        ("/v1/detect",),
        _TAG,
        "Find objects in one image",
        "The upload is as for /v1/classify. Boxes come best first, in pixels of the upright image, whose width and "
        "height are told, too.",
        f"-F file=@street.jpg '{HOST}/v1/detect?model=yolov3-tiny&score_threshold=0.3&classes=person&classes=bus'",
        {
            "model": "yolov3-tiny",
            "detections": [
                {
                    "label": {"index": 0, "name": "person", "score": 0.97},
                    "left": 45.5,
                    "top": 404.9,
                    "right": 208.7,
                    "bottom": 891.2,
                }
            ],
            "width": 810,
            "height": 1080,
            **_SERVER,
        },
        _CONTENT,
        (
            *_BEFORE,
            query_parameter("score_threshold", "number", "Boxes with a lower score are left out, 0..1."),
            query_parameter("iou_threshold", "number", "Of two boxes of one class that overlap by more, one stays."),
            query_parameter("max_detections", "integer", "The best so many boxes."),
            query_parameter("classes", "string", "Only boxes of this class; may be given several times."),
            *_AFTER,
        ),
    ),
    Detections,
    "boxes",
    _boxes,
    frozenset({"classes"}),
    pipeline="object_detection",
)
_TEXT = {"text/plain": {"schema": {"type": "string"}}}
_TRUNCATE = query_parameter("truncate", "boolean", "False: a text that is too long is refused, not cut.")
EMBED = UploadTask(
    "Embed",
    Operation(
        "embed",
        "POST",
        ("/v1/embed",),
        _TAG,
        "One text as a vector",
        "The upload is the text itself, UTF-8, or a form with one file.",
        f"--data-binary 'The river turns the wheel.' '{HOST}/v1/embed?model=all-minilm-l6-v2'",
        {"model": "all-minilm-l6-v2", "embedding": [0.031, -0.004], "tokens": 8, "truncated": False, **_SERVER},
        _TEXT,
        (
            *_BEFORE,
            _TRUNCATE,
            query_parameter("normalize", "boolean", "Whether the vector is brought to length 1."),
            *_AFTER,
        ),
    ),
    Embedding,
    "a vector",
    _vector,
    kind="text",
    pipeline="text_embedding",
)
ENTITIES = UploadTask(
    "Entities",
    Operation(
        "entities",
        "POST",
        ("/v1/entities",),
        _TAG,
        "The entities of one text",
        "The upload is as for /v1/embed. Entities come in the order of the text; start and end count its characters.",
        f"--data-binary 'Anna lives in Berlin.' '{HOST}/v1/entities'",
        {
            "model": "my-entities",
            "entities": [
                {"label": {"index": 1, "name": "PER", "score": 0.99}, "start": 0, "end": 4, "text": "Anna"},
            ],
            "truncated": False,
            **_SERVER,
        },
        _TEXT,
        (
            *_BEFORE,
            query_parameter("score_threshold", "number", "Entities with a lower score are left out, 0..1."),
            _TRUNCATE,
            *_AFTER,
        ),
    ),
    Entities,
    "entities",
    _entities,
    kind="text",
    pipeline="token_classification",
)
TASKS = (CLASSIFY, DETECT, EMBED, ENTITIES)
"""All of them."""
