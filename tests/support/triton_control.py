"""Load and unload with the real tritonclient, in a process of its own (`own_process`)."""

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def load_and_unload(address: str) -> list[str]:
    """What `identity` says before, while it is unloaded, and after; then what unknown names get."""
    said = []
    with triton.InferenceServerClient(address) as client:
        given = triton.InferInput("INPUT0", [1, 16], "FP32")
        given.set_data_from_numpy(np.ones((1, 16), np.float32))

        def status(call: str, *arguments: object) -> str:
            try:
                getattr(client, call)(*arguments)
            except InferenceServerException as error:
                return str(error.status()).removeprefix("StatusCode.")
            return "OK"

        assert "model_repository" in client.get_server_metadata().extensions
        said.append(status("infer", "identity", [given]))
        client.unload_model("identity")
        assert not client.is_model_ready("identity")
        assert client.is_server_ready()
        said.append(status("infer", "identity", [given]))
        client.load_model("identity")
        assert client.is_model_ready("identity")
        said.append(status("infer", "identity", [given]))
        said += [status("load_model", "nothing"), status("unload_model", "nothing"), status("load_model", "../x")]
    return said
