"""What the server tells about itself and its models, ready for JSON: the gRPC form's messages, as dictionaries."""

from typing import Any

from google.protobuf.message import Message

from gateway.api.open_inference import metadata, statistics
from gateway.api.open_inference.models import Served, versions_of
from gateway.api.open_inference.repository import state_word
from gateway.api.open_inference.service import OpenInference
from protos.inference import grpc_service_pb2 as pb


def server(parts: OpenInference) -> dict[str, Any]:
    """Name, version and what works."""
    extensions = metadata.extensions(shared_memory=parts.infer.memory.is_on, repository=parts.repository.is_open)
    return {"name": metadata.SERVER_NAME, "version": metadata.server_version(), "extensions": extensions}


def model(parts: OpenInference, found: Served) -> dict[str, Any]:
    """Inputs and outputs."""
    versions = [each.version for each in versions_of(parts.models, found.name)]
    return as_json(metadata.model_metadata(found, versions))


def config(found: Served) -> dict[str, Any]:
    """Batching and tensors."""
    return as_json(metadata.model_config(found))


def counts(parts: OpenInference, chosen: list[Served], version: str) -> dict[str, Any]:
    """Statistics of these models; `version` as the caller wrote it, or empty."""
    messages = [statistics.message(one, parts.statistics.of(one.name, one.version), version) for one in chosen]
    return as_json(pb.ModelStatisticsResponse(model_stats=messages))


def index(parts: OpenInference, *, only_ready: bool) -> list[dict[str, str]]:
    """All models of the repository with their state."""
    return [
        {"name": one.name, "version": one.version, "state": state_word(one.phase), "reason": one.reason}
        for one in parts.repository.index(only_ready=only_ready)
    ]


def as_json(message: Message) -> dict[str, Any]:
    """Every field under its own name; messages only where they are set.

    protobuf's own JSON form writes 64-bit integers as texts, which clients of this protocol don't read.
    """
    return {
        field.name: _value(message, field)
        for field in message.DESCRIPTOR.fields
        if field.is_repeated or not field.has_presence or message.HasField(field.name)
    }


def _value(message: Message, field: Any) -> Any:  # noqa: ANN401 - JSON
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_single(field, one) for one in value]
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:  # noqa: ANN401 - JSON
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
