"""What users import and type: the client and the command line.

    from headrace import Client

    with Client() as client:
        print(client.classify("cat.jpg", top_k=5))

Importing this package loads nothing; the client loads grpc and protobuf when it is first named.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.client import AsyncClient as AsyncClient
    from headrace.client import Client as Client
    from headrace.client_errors import InferenceError as InferenceError

__all__ = ["AsyncClient", "Client", "InferenceError"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from headrace import client  # noqa: PLC0415 - the command line and the server must not pay for the client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
