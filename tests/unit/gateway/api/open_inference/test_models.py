"""What is declared for each kind of pipeline, and which served model a name means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.open_inference import metadata
from gateway.api.open_inference.models import find, number_of, versions_of, view_of
from gateway.state import Role
from protos.inference import grpc_service_pb2 as pb
from shared.errors import HeadraceError, InvalidInput, UnknownModel, UnknownVersion
from shared.tensors import DTYPES
from tests.support.fake_flow import VERSION
from tests.support.open_inference_parts import Models, declared, identity_models, tensor_model

MODELS = Models(identity_models())


def test_a_model_is_found_by_name_with_or_without_its_version() -> None:
    assert find(MODELS, "identity", "").name == find(MODELS, "identity", VERSION).name == "identity"


@given(st.integers(0, 2**64 - 1))
def test_a_versions_number_is_a_64_bit_integer_as_c_programs_write_it(number: int) -> None:
    version = f"{number:016x}"

    assert number_of(version) == str(number >> 4)
    assert int(number_of(version)) < 2**63


def test_a_model_is_found_by_its_versions_number() -> None:
    assert find(MODELS, "identity", number_of(VERSION)).name == "identity"


@pytest.mark.parametrize(
    ("name", "version", "error"),
    [
        ("", "", UnknownModel),
        ("nothing", "", UnknownModel),
        ("Identity", "", UnknownModel),
        ("identity", "1", UnknownVersion),
        ("identity", "9" * 19, UnknownVersion),
        ("identity", "9" * 20, InvalidInput),
        ("identity", "f" * 16, UnknownVersion),
        ("identity", "1 ", InvalidInput),
        ("identity", "0x1", InvalidInput),
        ("identity", "-1", InvalidInput),
        ("identity", "1.0", InvalidInput),
        ("identity", VERSION.upper(), InvalidInput),
        ("identity", VERSION + "0", InvalidInput),
        ("identity", "٣", InvalidInput),
    ],
)
def test_what_is_not_found(name: str, version: str, error: type[HeadraceError]) -> None:
    with pytest.raises(HeadraceError) as caught:
        find(MODELS, name, version)
    assert type(caught.value) is error


def test_an_unready_model_is_found_too() -> None:
    models = Models(identity_models())
    models.served[0].state.phase = "loading"
    assert find(models, "identity", "").state.phase == "loading"


def test_an_unloaded_model_is_not_found() -> None:
    models = Models(identity_models())
    models.served[0].state.phase = "unloaded"
    with pytest.raises(UnknownModel):
        find(models, "identity", "")


def test_a_classifier_takes_encoded_images_and_gives_three_tensors() -> None:
    view = view_of(find(MODELS, "classifier", ""))

    assert [(one.name, one.datatype, one.shape) for one in view.inputs] == [("image", "BYTES", (1,))]
    assert [one.name for one in view.outputs] == ["scores", "classes", "labels"]


@pytest.mark.parametrize("datatype", DTYPES)
def test_every_datatype_has_its_configuration_name(datatype: str) -> None:
    model = tensor_model("m", [declared("x", datatype, -1, 3)], [declared("y", datatype)])

    described, config = metadata.model_metadata(model, ["v"]), metadata.model_config(model)

    assert (described.inputs[0].datatype, list(described.inputs[0].shape)) == (datatype, [-1, -1, 3])
    assert list(described.outputs[0].shape) == [-1]
    assert list(config.input[0].dims) == [-1, 3]
    assert pb.DataType.Name(config.input[0].data_type) == ("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")


@pytest.mark.parametrize("role", ["coming", "retiring", "shadow"])
def test_a_version_that_answers_nobody_is_not_listed_and_the_current_one_comes_first(role: Role) -> None:
    standby, current, hidden = (identity_models()[0] for _ in range(3))
    standby.state.role, hidden.state.role = "standby", role
    assert versions_of(Models([standby, hidden, current]), current.name) == [current, standby]
