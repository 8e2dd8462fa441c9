"""Our .proto against tritonclient's message classes; runs in a process of its own (`own_process`)."""

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import service_pb2


def contract(ours: str) -> list[str]:
    """Every message, field, number and type of our descriptor set, as `name number type label`, that differs."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(Path(ours).read_bytes()).file:
        pool.Add(file)
    theirs = service_pb2.DESCRIPTOR.pool
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    other = theirs.FindServiceByName("inference.GRPCInferenceService")
    wrong = [
        method.name
        for method in service.methods
        if (method.input_type.full_name, method.output_type.full_name)
        != (
            other.methods_by_name[method.name].input_type.full_name,
            other.methods_by_name[method.name].output_type.full_name,
        )
    ]
    for method in service.methods:
        for message in (method.input_type, method.output_type):
            wrong += _differences(message, theirs.FindMessageTypeByName(message.full_name), set())
    return wrong


def _differences(ours: Descriptor, theirs: Descriptor, seen: set[str]) -> list[str]:
    if ours.full_name in seen:
        return []
    seen.add(ours.full_name)
    wrong = []
    for field in ours.fields:
        other = theirs.fields_by_name.get(field.name)
        if other is None or _facts(field) != _facts(other):
            wrong.append(f"{ours.full_name}.{field.name} {_facts(field)}")
        elif field.message_type is not None and other.message_type is not None:
            wrong += _differences(field.message_type, other.message_type, seen)
    return wrong


def _facts(field: FieldDescriptor) -> tuple[int, int, bool, str, str]:
    oneof = field.containing_oneof.name if field.containing_oneof else ""
    kind = field.message_type or field.enum_type
    return field.number, field.type, field.is_repeated, kind.full_name if kind else "", oneof
