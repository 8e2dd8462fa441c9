"""An input that ends the worker costs its own caller, not the server: kept away after two deaths, back in seconds."""

import struct
from pathlib import Path

import grpc
import pytest

from headrace import Client, InferenceError
from headrace.client_results import Tensor, Tensors
from shared.repository import Meta
from shared.repository_writer import add_version
from tests.support.stack import Site, eventually, serving, simulated_repository

NETWORK = """
import os

def build():
    def network(x):
        if (x >= 666).any():
            os._exit(11)
        return x
    return network
"""
MODEL = """
pipeline: tensor
backend: numpy
network: net:build
preprocessing:
  inputs: [{name: x, datatype: FP32, shape: [1]}]
  outputs: [{name: x, datatype: FP32, shape: [1]}]
"""


def number(value: float) -> Tensors:
    return Tensors((Tensor("x", "FP32", (1, 1), struct.pack("<f", value)),))


def test_poison_for_the_worker(tmp_path: Path) -> None:
    repository = simulated_repository(tmp_path / "models", "sim")
    folder = repository / "fragile"
    folder.mkdir()
    (folder / "model.yaml").write_text(MODEL)
    (folder / "net.py").write_text(NETWORK)
    add_version(repository, "fragile", {"nothing.json": folder / "model.yaml"}, Meta(source="test"), make_current=True)
    site = Site(tmp_path / "site", repository, supervisor={"max_failures": 3, "backoff_first_ms": 50})
    with serving(site) as process, Client(site.grpc, max_attempts=1) as client:
        for poison in (666.0, 666.5, 666.75):  # three different ones: six deaths, more than supervisor.max_failures
            eventually("the server to be ready", site.ready, 20.0)
            with pytest.raises(InferenceError) as caught:
                client.predict([number(poison)], model="fragile", timeout_s=20)
            assert caught.value.code == grpc.StatusCode.UNAVAILABLE
            eventually("the server to be ready", site.ready, 20.0)
            with pytest.raises(InferenceError) as caught:
                client.predict([number(poison)], model="fragile", timeout_s=20)
            assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION  # the second time without a death
        eventually("the server to be ready", site.ready, 20.0)
        (answer,) = client.predict([number(7.0)], model="fragile", timeout_s=10).results
        assert isinstance(answer, Tensors)
        assert answer.tensors[0].data == struct.pack("<f", 7.0)
        assert process.popen.poll() is None
        lost = next(line for line in site.get("/metrics")[1].splitlines() if line.startswith("headrace_workers_lost"))
        assert float(lost.split()[1]) == 6
