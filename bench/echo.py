"""Plain grpc.aio, one process: takes the bytes of a request and gives bytes back, without parsing either.

`/bench.Echo/Same` answers the request's own bytes; `/bench.Echo/Answer` the bytes of a real answer (about 200), which
is what a server has to send. Stops on SIGTERM.
"""

import argparse
import asyncio
import signal
from pathlib import Path

import grpc
import grpc.aio

_Context = grpc.aio.ServicerContext[bytes, bytes]


def _handlers(answer: bytes) -> grpc.GenericRpcHandler:
    async def same(request: bytes, _context: _Context) -> bytes:
        return request

    async def answered(_request: bytes, _context: _Context) -> bytes:
        return answer

    return grpc.method_handlers_generic_handler(
        "bench.Echo",
        {"Same": grpc.unary_unary_rpc_method_handler(same), "Answer": grpc.unary_unary_rpc_method_handler(answered)},
    )


async def _serve(answer: bytes) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_handlers(answer),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await stop.wait()
    await server.stop(grace=None)


def main() -> None:
    """Serve on a free port and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answer", required=True, type=Path, help="file with the bytes that Answer gives back")
    asyncio.run(_serve(parser.parse_args().answer.read_bytes()))


if __name__ == "__main__":
    main()
