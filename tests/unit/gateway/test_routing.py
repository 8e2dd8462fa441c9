import pytest

from gateway.routing import RETRY_MS, Routing
from gateway.served import ServedModel, task_of
from gateway.split import Split
from gateway.state import ModelState, Phase, Role
from shared.errors import InvalidInput, NotReady, UnknownModel, UnknownVersion
from shared.pipelines.object_detection import ObjectDetection
from tests.support.gateway_parts import WordPipeline, served


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


def having(number: int, task: str, name: str) -> ServedModel:
    model = served(number, name=name)
    model.task = task
    return model


def test_of_several_models_without_a_name_the_task_decides() -> None:
    vectors, labels, own = (
        having(number, task, name)
        for number, (task, name) in enumerate([("text_embedding", "v"), ("text_classification", "l"), ("", "own")])
    )
    routing = Routing([vectors, labels, own])
    assert routing.route("", "", "text", task="text_embedding") is vectors
    assert routing.route("", "", "text", task="text_classification") is labels
    assert routing.route("own", "", "text", task="text_embedding") is own
    with pytest.raises(InvalidInput, match="several take text: v, l, own; name the one that is meant"):
        routing.route("", "", "text")


def test_a_task_that_no_model_has_leaves_the_choice_to_the_input() -> None:
    own = having(1, "", "own")
    assert Routing([own]).route("", "", "text", task="text_classification") is own
    with pytest.raises(InvalidInput, match="none takes image"):
        Routing([own]).route("", "", "image", task="image_classification")


def test_several_models_of_one_task_are_told_without_the_others() -> None:
    routing = Routing([having(1, "text_embedding", "a"), having(2, "text_embedding", "b"), having(3, "", "own")])
    with pytest.raises(InvalidInput, match="several take text for text_embedding: a, b; name the one"):
        routing.route("", "", "text", task="text_embedding")


def test_a_pipeline_that_builds_on_a_built_in_one_has_its_task() -> None:
    class Own(ObjectDetection):
        pass

    assert task_of(Own.__new__(Own)) == "object_detection"
    assert task_of(served().pipeline) == ""

    class Writes(WordPipeline):
        generates = True

    assert task_of(Writes()) == "text_generation"


# ------------------------------------------------------------ versions of one model


def version(number: int, role: Role = "current", phase: Phase = "ready") -> ServedModel:
    model = served(number)
    model.state.version, model.state.role, model.state.phase = f"{number:016x}", role, phase
    return model


def several(*more: ServedModel) -> tuple[Routing, ServedModel]:
    """A model whose current version is number 1, with more that nobody is sent to."""
    current = version(1)
    routing = Routing([current])
    for model in more:
        routing.add(model)
    return routing, current


def test_a_canary_gets_its_share_and_the_same_key_always_goes_to_the_same_version() -> None:
    canary = version(2, "canary")
    routing, current = several(canary)
    routing.point(Split(current, canary, 25.0))
    keys = [str(each) for each in range(4000)]
    routed = [routing.route("words", "", "text", key, f"r{key}") for key in keys]
    share = routed.count(canary) / len(keys)
    assert 0.25 - 0.035 < share < 0.25 + 0.035  # five standard deviations
    assert routed == [routing.route("words", "", "text", key, "another id") for key in keys]
    by_id = [routing.route("", "", "text", "", key) for key in keys]
    assert by_id == routed, "who has no key goes by its id"
    routing.point(Split(current, canary, 50.0))
    grown = [routing.route("words", "", "text", key) for key in keys]
    assert all(after is canary for before, after in zip(routed, grown, strict=True) if before is canary)


@pytest.mark.parametrize("phase", ["no_worker", "loading", "proving", "failed", "unloaded"])
def test_a_canary_that_can_not_answer_takes_nobody(phase: Phase) -> None:
    canary = version(2, "canary", phase)
    routing, current = several(canary)
    routing.point(Split(current, canary, 100.0))
    assert routing.route("words", "", "text", "key") is current


def test_a_shadow_answers_nobody() -> None:
    shadow = version(2, "shadow")
    routing, current = several(shadow)
    routing.point(Split(current, shadow, 100.0, shadow=True))
    assert routing.route("words", "", "text", "key") is current


@pytest.mark.parametrize("role", ["canary", "standby"])
def test_who_names_a_version_gets_it_whatever_it_is_to_the_model(role: Role) -> None:
    other = version(2, role)
    routing, current = several(other)
    assert routing.route("words", other.version, "text") is other
    assert routing.route("words", current.version, "text") is current
    assert routing.route("words", "", "text") is current


def test_a_shadow_answers_nobody_who_names_it_either() -> None:
    shadow = version(2, "shadow")
    routing, current = several(shadow)
    routing.point(Split(current, shadow, 100.0, shadow=True))
    with pytest.raises(UnknownVersion, match=f"version {shadow.version} of model 'words' is a shadow: it gets copies"):
        routing.route("words", shadow.version, "text")
    with pytest.raises(UnknownVersion, match=f"its version is {current.version}$"):
        routing.route("words", "f" * 16, "text")


@pytest.mark.parametrize("phase", ["loading", "ready"])
def test_a_version_that_is_only_coming_is_unknown_also_once_it_is_ready(phase: Phase) -> None:
    coming = version(2, "coming", phase)
    routing, current = several(coming)
    with pytest.raises(UnknownVersion, match=f"is not served; its version is {current.version}$"):
        routing.route("words", coming.version, "text")


def test_a_version_that_is_leaving_is_named_by_nobody_any_more() -> None:
    routing, current = several(version(2, "retiring"), version(3, "standby"))
    with pytest.raises(UnknownVersion) as caught:
        routing.route("words", f"{2:016x}", "text")
    assert caught.value.text == (
        f"version '{2:016x}' of model 'words' is not served; its versions are {current.version}, {3:016x}"
    )


def test_an_unknown_version_is_told_which_there_are_each_once_and_cut() -> None:
    again = version(1, "coming")
    again.number = 9
    routing, current = several(again, version(2, "standby"))
    with pytest.raises(UnknownVersion, match=f"its versions are {current.version}, {2:016x}$"):
        routing.route("words", "x" * 10_000, "text")
    with pytest.raises(UnknownVersion, match=f"its version is {current.version}$"):
        Routing([current]).route("words", "f" * 16, "text")


def test_while_two_contents_of_model_yaml_are_loaded_the_version_s_name_means_the_one_that_answers() -> None:
    coming = version(1, "coming")
    coming.number = 2
    routing, current = several(coming)
    assert routing.route("words", current.version, "text") is current
    routing.point(Split(coming))
    assert routing.route("words", current.version, "text") is coming


@pytest.mark.parametrize("phase", ["on_demand", "loading", "proving"])
def test_what_is_loaded_on_demand_is_sent_on_to_wait_and_what_is_pinned_is_not(phase: Phase) -> None:
    lazy = version(1, phase=phase)
    lazy.state.on_demand = True
    assert Routing([lazy]).route("words", "", "text") is lazy
    lazy.state.on_demand = False
    with pytest.raises(NotReady) as caught:
        Routing([lazy]).route("words", "", "text")
    assert caught.value.retry_after_ms == RETRY_MS[phase]


@pytest.mark.parametrize("phase", ["failed", "no_worker"])
def test_what_can_not_be_loaded_on_demand_now_says_why(phase: Phase) -> None:
    lazy = version(1, phase=phase)
    lazy.state.on_demand, lazy.state.reason = True, "it needs 9 GB"
    with pytest.raises(NotReady, match="it needs 9 GB"):
        Routing([lazy]).route("words", "", "text")


@pytest.mark.parametrize("pinned", [True, False])
def test_an_unloaded_model_is_unknown_by_name_and_by_version(pinned: bool) -> None:
    model = version(1, phase="unloaded")
    model.state.on_demand = not pinned
    for asked in ("", model.version):
        with pytest.raises(UnknownModel, match="has no loaded version; load it first"):
            Routing([model]).route("words", asked, "text")


def test_a_model_that_can_not_be_served_says_why_until_it_is() -> None:
    routing = Routing([], [ModelState("words", "", "failed", "its model file is bad")])
    with pytest.raises(NotReady, match="its model file is bad") as caught:
        routing.route("words", "", "text")
    assert caught.value.retry_after_ms == 5000
    assert [state.phase for state in routing.states()] == ["failed"]
    model = version(1)
    routing.add(model)
    routing.point(Split(model))
    assert routing.states() == [model.state]
    assert routing.route("words", "", "text") is model


def test_a_version_that_is_removed_is_gone_and_the_current_one_takes_its_model_along() -> None:
    canary = version(2, "canary")
    routing, current = several(canary)
    routing.remove(canary)
    assert (routing.get(2), routing.of("words"), routing.split("words")) == (None, [current], Split(current))
    routing.remove(current)
    routing.remove(current)
    assert (list(routing), routing.split("words")) == ([], None)
    with pytest.raises(UnknownModel):
        routing.route("words", "", "text")
