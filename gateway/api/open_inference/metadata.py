"""What clients and load generators ask before the first request: the server's and the models' metadata as protobuf."""

from importlib.metadata import PackageNotFoundError, version

from gateway.api.open_inference.models import Served, view_of
from protos.inference import grpc_service_pb2 as pb
from shared.tensors import TensorSpec

SERVER_NAME = "headrace"
_EXTENSIONS = (
    "classification",
    "model_configuration",
    "statistics",
    "binary_tensor_data",
    "parameters",
    "schedule_policy",
)
"""Those that always work. Clients switch on these words, so nothing is named that does not."""

_TYPES = {"BYTES": pb.TYPE_STRING}


def server_version() -> str:
    """Of the installed package."""
    try:
        return version("headrace")
    except PackageNotFoundError:  # run from a folder without an installation
        return "unknown"


def extensions(*, shared_memory: bool, repository: bool) -> list[str]:
    """The extensions that work with the present settings."""
    optional = {"system_shared_memory": shared_memory, "model_repository": repository}
    return [*_EXTENSIONS, *(name for name, works in optional.items() if works)]


def platform(model: Served) -> str:
    """`<project>_<kind of input>`: which backend runs it is the worker's business."""
    return f"{SERVER_NAME}_{model.spec.kind}"


def model_metadata(model: Served, versions: list[str]) -> pb.ModelMetadataResponse:
    """A model's inputs and outputs, with the row dimension."""
    view = view_of(model)
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=versions,
        platform=platform(model),
        inputs=[_tensor(spec) for spec in view.inputs],
        outputs=[_tensor(spec) for spec in view.outputs],
    )


def model_config(model: Served) -> pb.ModelConfig:
    """The same as a batching configuration: dimensions without the rows, BYTES under its other name."""
    view, limits = view_of(model), model.limits
    config = pb.ModelConfig(
        name=model.name,
        platform=platform(model),
        backend=SERVER_NAME,
        max_batch_size=limits.max_rows,
        input=[pb.ModelInput(name=one.name, data_type=_type(one), dims=one.shape) for one in view.inputs],
        output=[pb.ModelOutput(name=one.name, data_type=_type(one), dims=one.shape) for one in view.outputs],
    )
    config.dynamic_batching.preferred_batch_size.extend(limits.sizes)
    config.dynamic_batching.max_queue_delay_microseconds = round(limits.max_wait_s * 1e6)
    return config


def _tensor(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=(-1, *spec.shape))


def _type(spec: TensorSpec) -> "pb.DataType.ValueType":
    return _TYPES.get(spec.datatype) or pb.DataType.Value(f"TYPE_{spec.datatype}")
