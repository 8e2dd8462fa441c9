from gateway.api.http import DOCS
from gateway.api.http_page import page
from gateway.api.open_inference import rest_docs


def test_the_page_shows_every_path_and_loads_nothing() -> None:
    text = page(DOCS)

    assert all(path in text for operation in DOCS for path in operation.paths)
    assert not any(word in text for word in ("src=", "<script", "<link", "@import"))


def test_fixed_paths_come_before_those_that_would_take_them_for_a_model() -> None:
    paths = [path for operation in DOCS for path in operation.paths]

    assert paths.index("/v2/models/stats") < paths.index("/v2/models/{model}")


def test_every_parameter_of_a_path_is_described() -> None:
    for operation in DOCS:
        for path in operation.paths:
            described = [one["name"] for one in operation.openapi(path)["parameters"] if one["in"] == "path"]
            assert described == [part[1:-1] for part in path.split("/") if part.startswith("{")]


def test_the_protocol_has_its_own_endpoints_and_no_others() -> None:
    assert all(path.split("/")[1] == "v2" for operation in rest_docs.DOCS for path in operation.paths)
