"""The admin service's messages ⇄ plain data. No input or output of its own but reading the files of a new version."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from headrace import admin_results as results
from headrace.client_errors import trailers_of
from protos.headrace.v1 import admin_pb2 as pb
from shared.errors import BY_CODE, Code, ExitCode, InternalFault, StartupError, rebuild
from shared.traffic import Traffic

CHUNK_BYTES = 1024 * 1024

_T = TypeVar("_T")


class NoServer(StartupError):
    """No server answers where one was looked for."""


def error(error: grpc.RpcError) -> Exception:
    """A failed call as the error that it was on the server."""
    trailers, text = trailers_of(error.trailing_metadata()), error.details() or error.code().name
    reason = trailers.get("error-reason", "")
    if reason == "unauthenticated":
        return StartupError(ExitCode.BAD_SETTINGS, f"the server refuses the token (--token-file): {text}")
    if reason == Code.INTERNAL.value:
        return InternalFault(f"{text} (request {trailers.get('request-id', 'unknown')})")
    if reason in {code.value for code in BY_CODE}:
        return rebuild(reason, text)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return rebuild(Code.DEADLINE_EXCEEDED.value, "the server did not answer in time; what was ordered may go on")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return NoServer(ExitCode.PEER_LOST, f"the server went away: {text}")
    return InternalFault(f"the call failed: {text}")


def plain(message: Message, kind: type[_T]) -> _T:
    """A message as our own struct: both have the same fields."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return msgspec.convert(fields, kind, strict=False)  # numbers of 64 bits are texts in protobuf's JSON


def traffic(message: pb.Traffic) -> Traffic:
    """As traffic.json has it."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    fields["history"] = [change(each) for each in message.history]
    return msgspec.convert(fields, Traffic, strict=False)


def change(message: pb.Change) -> dict[str, Any]:
    """An entry as traffic.json has it."""
    entry: dict[str, Any] = {"at": message.at, "action": message.action}
    entry |= {"from": message.from_version, "to": message.to_version, "by": message.by}
    if message.percent:
        entry["percent"] = message.percent
    if message.reason:
        entry["reason"] = message.reason
    if message.figures_json:
        entry["figures"] = json.loads(message.figures_json)
    return entry


def meta(message: pb.Meta) -> dict[str, Any]:
    """As meta.json has it."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    text = fields.pop("hyperparameters_json")
    return {**fields, "hyperparameters": json.loads(text) if text else {}}


def parts(header: pb.AddVersionHeader, files: Iterable[Path], broken: list[OSError]) -> Iterator[pb.AddVersionRequest]:
    """A new version as a stream; what can't be read here ends it, and is put into `broken`."""
    yield pb.AddVersionRequest(header=header)
    try:
        for path in files:
            with path.open("rb") as file:
                while piece := file.read(CHUNK_BYTES):
                    yield pb.AddVersionRequest(chunk=piece)
    except OSError as error:
        broken.append(error)
        raise


def diff(message: pb.DiffResponse) -> results.Diff:
    """What two versions differ in."""
    weights = [
        results.Weights(each.file, list(map(_different, each.differences)), each.same_layout, each.unread_values)
        for each in message.weights
    ]
    differences = list(map(_different, message.differences))
    return results.Diff(message.from_version, message.to_version, differences, weights)


def _different(message: pb.Difference) -> results.Difference:
    before, after = (json.loads(text) if text else None for text in (message.before_json, message.after_json))
    return results.Difference(message.what, before, after)
