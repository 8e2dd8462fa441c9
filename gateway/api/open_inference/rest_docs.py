"""What the protocol's HTTP endpoints are called, take and answer."""

import msgspec

from gateway.api.http_docs import BINARY, HOST, Operation


def _both(prefix: str, suffix: str = "") -> tuple[str, ...]:
    """With and without a version."""
    return (f"{prefix}/{{model}}{suffix}", f"{prefix}/{{model}}/versions/{{version}}{suffix}")


_MODELS = "/v2/models"
_INFER_REQUEST = {
    "id": "42",
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [0.5, 1, 1.5, 2]}],
}
_INFER_ANSWER = {
    "model_name": "identity",
    "model_version": "0123456789abcdef",
    "id": "42",
    "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 4], "data": [0.5, 1.0, 1.5, 2.0]}],
}
_GENERATE_REQUEST = {"text_input": "The river", "parameters": {"max_tokens": 20, "stop": ["."]}}
_GENERATE_ANSWER = {
    "model_name": "writer",
    "model_version": "0123456789abcdef",
    "text_output": " runs to the sea",
    "finish_reason": "stop_string",
    "prompt_tokens": 2,
    "completion_tokens": 5,
}
_REGISTER = {"key": "/headrace-in", "offset": 0, "byte_size": 64}

DOCS: tuple[Operation, ...] = (
    # The first path that fits is taken: /v2/models/stats has to come before /v2/models/{model}.
    Operation(
        "infer",
        "POST",
        _both(_MODELS, "/infer"),
        "Open Inference Protocol",
        "Infer",
        "JSON, or JSON followed by raw tensors: then the header `Inference-Header-Content-Length` is the length of the "
        "JSON, each such input has the parameter `binary_data_size` instead of data, and outputs are asked for in "
        "binary with their parameter `binary_data` or the request's `binary_data_output`. data is a flat list or "
        "nested as the shape; FP16 and BF16 exist in binary only. The parameter `timeout` is in microseconds. Image "
        "and text models take their encoded input as one BYTES element a row, their options as parameters. Bodies may "
        "be compressed (gzip, deflate).",
        f"{HOST}/v2/models/identity/infer -d '{msgspec.json.encode(_INFER_REQUEST).decode()}'",
        _INFER_ANSWER,
        {"application/json": {"example": _INFER_REQUEST}, "application/octet-stream": {"schema": BINARY}},
    ),
    Operation(
        "generate",
        "POST",
        _both(_MODELS, "/generate"),
        "Text",
        "Generate a text",
        "`parameters` are the options of generation (max_tokens, temperature, top_k, top_p, repetition_penalty, seed, "
        "stop, stop_token_ids, beams, length_penalty, logprobs) and those of infer, `timeout` in microseconds among "
        "them; any other one is refused. With `logprobs` the answer has a list of that name, a token an entry.",
        f"{HOST}/v2/models/writer/generate -d '{msgspec.json.encode(_GENERATE_REQUEST).decode()}'",
        _GENERATE_ANSWER,
        {"application/json": {"example": _GENERATE_REQUEST}},
    ),
    Operation(
        "generate_stream",
        "POST",
        _both(_MODELS, "/generate_stream"),
        "Text",
        "Generate a text, and send it while it grows",
        "Server-sent events: each is `data: ` and JSON as generate answers it, with what is new of the text; the last "
        "one says why it ended. A failure before the first event is an HTTP status, after it an event with `error`. "
        "Closing the connection ends the work with the next token.",
        f"-N {HOST}/v2/models/writer/generate_stream -d '{msgspec.json.encode(_GENERATE_REQUEST).decode()}'",
        {"model_name": "writer", "model_version": "0123456789abcdef", "text_output": " runs"},
        {"application/json": {"example": _GENERATE_REQUEST}},
    ),
    Operation(
        "live",
        "GET",
        ("/v2/health/live",),
        "Open Inference Protocol",
        "The process answers",
        "",
        f"{HOST}/v2/health/live",
        {"live": True},
    ),
    Operation(
        "ready",
        "GET",
        ("/v2/health/ready",),
        "Open Inference Protocol",
        "Every served model can answer now",
        "503 and the reason otherwise.",
        f"{HOST}/v2/health/ready",
        {"ready": True},
    ),
    Operation(
        "server",
        "GET",
        ("/v2",),
        "Open Inference Protocol",
        "Name, version and extensions of the server",
        "",
        f"{HOST}/v2",
        {"name": "headrace", "version": "0.1.0", "extensions": ["binary_tensor_data", "classification"]},
    ),
    Operation(
        "stats",
        "GET",
        ("/v2/models/stats", *_both(_MODELS, "/stats")),
        "Open Inference Protocol",
        "What happened so far, counted and timed",
        "Times are cumulative nanoseconds.",
        f"{HOST}/v2/models/identity/stats",
        {"model_stats": [{"name": "identity", "inference_count": 7, "execution_count": 2}]},
    ),
    Operation(
        "model",
        "GET",
        _both(_MODELS),
        "Open Inference Protocol",
        "A model's inputs and outputs",
        "The first dimension of every shape counts rows; -1 is free.",
        f"{HOST}/v2/models/identity",
        {
            "name": "identity",
            "versions": ["0123456789abcdef"],
            "platform": "headrace",
            "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]}],
            "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 16]}],
        },
    ),
    Operation(
        "model_ready",
        "GET",
        _both(_MODELS, "/ready"),
        "Open Inference Protocol",
        "This model can answer now",
        "503 and the reason otherwise.",
        f"{HOST}/v2/models/identity/ready",
        {"name": "identity", "ready": True},
    ),
    Operation(
        "config",
        "GET",
        _both(_MODELS, "/config"),
        "Open Inference Protocol",
        "A model's configuration as load generators expect it",
        "",
        f"{HOST}/v2/models/identity/config",
        {"name": "identity", "max_batch_size": 32, "input": [{"name": "INPUT0", "data_type": "TYPE_FP32"}]},
    ),
    Operation(
        "index",
        "POST",
        ("/v2/repository/index",),
        "Model repository",
        "All models with their state",
        'The body is empty, or {"ready": true} for those that are ready.',
        f"-X POST {HOST}/v2/repository/index",
        [{"name": "identity", "version": "0123456789abcdef", "state": "READY", "reason": ""}],
        {"application/json": {"example": {"ready": True}}},
    ),
    Operation(
        "load",
        "POST",
        ("/v2/repository/models/{model}/load",),
        "Model repository",
        "Load a model",
        "501 unless the setting gateway.repository_control is on.",
        f"-X POST {HOST}/v2/repository/models/identity/load",
        {},
    ),
    Operation(
        "unload",
        "POST",
        ("/v2/repository/models/{model}/unload",),
        "Model repository",
        "Take a model out of service",
        "501 unless the setting gateway.repository_control is on.",
        f"-X POST {HOST}/v2/repository/models/identity/unload",
        {},
    ),
    Operation(
        "regions",
        "GET",
        ("/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/{region}/status"),
        "System shared memory",
        "Registered regions",
        "These endpoints answer 501 unless the setting gateway.system_shared_memory_prefix is set.",
        f"{HOST}/v2/systemsharedmemory/status",
        [{"name": "in", "key": "/headrace-in", "offset": 0, "byte_size": 64}],
    ),
    Operation(
        "register",
        "POST",
        ("/v2/systemsharedmemory/region/{region}/register",),
        "System shared memory",
        "Register a region",
        "key is the name of a POSIX shared memory object of this machine that begins with the configured prefix.",
        f"{HOST}/v2/systemsharedmemory/region/in/register -d '{msgspec.json.encode(_REGISTER).decode()}'",
        {},
        {"application/json": {"example": _REGISTER}},
    ),
    Operation(
        "unregister",
        "POST",
        ("/v2/systemsharedmemory/unregister", "/v2/systemsharedmemory/region/{region}/unregister"),
        "System shared memory",
        "Forget a region, or all",
        "Requests that use it still finish.",
        f"-X POST {HOST}/v2/systemsharedmemory/unregister",
        {},
    ),
)
