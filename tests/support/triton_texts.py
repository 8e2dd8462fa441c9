"""A text that grows, with the real tritonclient, in a process of its own (`own_process`)."""

import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton

LIMIT_S = 30.0


def read_along(address: str, model: str = "writer", prompt: str = "abc", max_tokens: int = 3) -> list[str]:
    """Its pieces."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    given = triton.InferInput("text_input", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[prompt]], dtype=object))
    found = []
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, [given], parameters={"max_tokens": max_tokens})
        final = False
        while not final:
            result, error = answers.get(timeout=LIMIT_S)
            if error is not None:
                raise error
            found.append(result.as_numpy("text_output")[0][0].decode())
            final = result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    return found
