import pytest

from gateway.routing import Routing
from shared.errors import InvalidInput, NotReady, UnknownModel, UnknownVersion
from tests.support.gateway_parts import served


def test_by_name_and_version() -> None:
    model = served()
    routing = Routing([model])
    assert routing.route("words", "", "text") is model
    assert routing.route("words", model.version, "text") is model


def test_an_empty_name_is_the_only_model() -> None:
    model = served()
    assert Routing([model]).route("", "", "text") is model
    with pytest.raises(InvalidInput, match="model is empty and of the served models several take text: words, other"):
        Routing([model, served(2, name="other")]).route("", "", "text")


@pytest.mark.parametrize("name", ["nobody", "../etc", "words\0", "x" * 10_000, "WORDS", "wоrds"])
def test_unknown_names_are_refused_and_cut(name: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        Routing([served()]).route(name, "", "text")
    assert len(caught.value.text) < 600


def test_unknown_version() -> None:
    with pytest.raises(UnknownVersion, match="version 'ffff' of model 'words' is not served"):
        Routing([served()]).route("words", "ffff", "text")


def test_a_model_that_is_not_ready_says_why_and_when_to_retry() -> None:
    model = served()
    model.state.phase, model.state.reason = "loading", "a worker is loading it"
    with pytest.raises(NotReady, match="a worker is loading it") as caught:
        Routing([model]).route("words", "", "text")
    assert caught.value.retry_after_ms == 1000


def test_an_empty_name_is_the_only_model_that_takes_such_input() -> None:
    with pytest.raises(InvalidInput, match="of the served models none takes image: words"):
        Routing([served()]).route("", "", "image")
