from gateway.api.open_inference import rest_facts
from protos.inference import grpc_service_pb2 as pb
from tests.support.open_inference_parts import Stack


def test_numbers_stay_numbers_and_enumerations_are_words() -> None:
    config = pb.ModelConfig(name="m", input=[pb.ModelInput(name="x", data_type=pb.TYPE_FP32, dims=[2**40])])

    told = rest_facts.as_json(config)

    assert (told["name"], told["max_batch_size"], told["output"]) == ("m", 0, [])
    assert told["input"][0]["data_type"] == "TYPE_FP32"
    assert told["input"][0]["dims"] == [2**40]


def test_messages_that_are_not_set_are_left_out() -> None:
    assert "dynamic_batching" not in rest_facts.as_json(pb.ModelConfig())


def test_every_phase_has_a_word_in_the_index() -> None:
    stack = Stack()
    told = rest_facts.index(stack.parts, only_ready=False)

    assert [model["state"] for model in told] == ["READY"] * len(stack.models.served)
