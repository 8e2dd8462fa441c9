"""Server reflection, v1 and v1alpha: grpcurl and others call without a `.proto` file.

grpcio-reflection brings v1alpha only. v1 has the same messages under another package name, so the same servicer answers
both; only v1's descriptor is made here, so that a client can describe v1 itself.
"""

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from gateway.api.interceptors import Context, Edge

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
_V1_FILE = "grpc/reflection/v1/reflection.proto"


def handlers(edge: Edge, services: tuple[str, ...]) -> dict[str, dict[str, "grpc.RpcMethodHandler[Any, Any]"]]:
    """Service name → method name → handler. `services` are the names to list besides reflection itself."""
    pool = descriptor_pool.Default()
    _add_v1(pool)
    servicer = ReflectionServicer((*services, V1, V1ALPHA), pool)
    parse = reflection_pb2.ServerReflectionRequest.FromString

    async def info(requests: AsyncIterable[bytes], context: Context) -> AsyncIterator[bytes]:
        async for answer in servicer.ServerReflectionInfo(edge.parsed(parse, requests, context), context):
            yield answer.SerializeToString()

    method: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(info)
    }
    return {V1: method, V1ALPHA: method}


def _add_v1(pool: descriptor_pool.DescriptorPool) -> None:
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        pool.AddSerializedFile(_v1_file().SerializeToString())


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    """v1alpha's file with v1's package in its own name and in every reference."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    old, new = f".{file.package}.", ".grpc.reflection.v1."
    file.name, file.package = _V1_FILE, "grpc.reflection.v1"
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(old, new)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old, new)
            method.output_type = method.output_type.replace(old, new)
    return file
