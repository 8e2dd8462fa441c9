"""The stage over a real arena, with pipelines of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest

from preprocess_pool.stage import Stage
from shared.arena import Arena, AttachedArena, Slot
from shared.clock import FOREVER_S
from shared.errors import InternalFault, InvalidInput, NotReady
from shared.messages import (
    Finished,
    FinishJob,
    JobFailed,
    OpenPipeline,
    PipelineOpened,
    PipelineRefused,
    Prepared,
    PrepareJob,
)
from shared.pipeline import Options, Pipeline, PipelineSpec, RawInput
from shared.pipeline import Prepared as PreparedInput
from shared.repository import Repository
from shared.results import Embedding, Result
from shared.tensors import Array, SlotRef, Tensor, TensorSpec, as_array
from tests.support.pictures import encode, photo
from tests.support.stack import simulated_repository

NOW_S = 1000.0
TRACE = "Traceback"


class Knobs(Options, frozen=True):
    add: Annotated[int, msgspec.Meta(ge=0, le=9)] = 0


class Doubler(Pipeline[Knobs]):
    """Bytes in, twice their values out; `act` is what `preprocess` does besides."""

    options_type = Knobs

    def __init__(self, width: int = 4) -> None:
        self._spec = PipelineSpec(
            kind="text",
            inputs=(TensorSpec(name="x", datatype="INT32", shape=(width,)),),
            outputs=(TensorSpec(name="y", datatype="FP32", shape=(2,)),),
        )
        self.act: Any = None
        self.seen: list[RawInput] = []

    @property
    def spec(self) -> PipelineSpec:
        return self._spec

    def preprocess(self, item: RawInput, options: Knobs, out: list[Array]) -> PreparedInput:
        self.seen.append(item)
        if isinstance(self.act, Exception):
            raise self.act
        values = np.frombuffer(item.data, np.uint8).astype(np.int32) * 2 + options.add
        if self.act is not None:
            return PreparedInput(tensors=[self.act(values)])
        out[0][0] = values
        return PreparedInput(tensors=[out[0]], context={"length": len(item.data)})

    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: Knobs) -> list[Result]:
        if isinstance(self.act, Exception):
            raise self.act
        results: list[Result] = [
            Embedding(values=[*row.tolist(), context["length"], options.add]) for row in outputs[0]
        ]
        return results[1:] if self.act == "too few" else results

    def example(self) -> RawInput:
        return RawInput(kind="text", data=b"1234")


class Bench:
    """A stage with an arena, and the pipeline under the number 1."""

    def __init__(self, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arena = Arena.create(1 << 20)
        self.attached = AttachedArena.attach(self.arena.fd, self.arena.nbytes)
        self.pipeline = Doubler()
        self.stage = Stage(self.attached, Repository(repository), clock=lambda: NOW_S)
        monkeypatch.setattr("preprocess_pool.stage.load_pipeline", lambda *_, **__: self.pipeline)
        assert self.open() == PipelineOpened(1)

    def open(self, name: str = "sim", version: str = "", model: int = 1) -> PipelineOpened | PipelineRefused:
        return self.stage.open(OpenPipeline(model, name, version))

    def slot(self, nbytes: int) -> Slot:
        slot = self.arena.lease(nbytes)
        assert slot is not None
        return slot

    def prepare(
        self,
        payload: bytes | SlotRef = b"\1\2\3\4",
        slots: list[SlotRef] | None = None,
        **more: Any,  # noqa: ANN401 - fields of the job
    ) -> Prepared | JobFailed:
        fields = {"job": 7, "deadline_s": FOREVER_S, "model": 1, "kind": "text", "options": msgspec.msgpack.encode({})}
        return self.stage.prepare(PrepareJob(payload=payload, slots=slots or [], **(fields | more)))

    def finish(self, rows: int = 2, **more: Any) -> Finished | JobFailed:  # noqa: ANN401 - fields of the job
        values = np.arange(rows * 2, dtype=np.float32)
        fields: dict[str, Any] = {
            "job": 8,
            "deadline_s": FOREVER_S,
            "model": 1,
            "options": msgspec.msgpack.encode({"add": 3}),
            "context": msgspec.msgpack.encode({"length": 4}),
            "tensors": [Tensor("y", "FP32", (rows, 2), values.tobytes())],
        }
        return self.stage.finish(FinishJob(**(fields | more)))

    def close(self) -> None:
        self.attached.close()
        self.arena.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(simulated_repository(tmp_path / "models"), monkeypatch)
    yield bench
    bench.close()


def failure_of(answer: object) -> tuple[str, str]:
    assert isinstance(answer, JobFailed | PipelineRefused)
    return answer.failure.code, answer.failure.text


def values_of(answer: object, bench: Bench) -> list[Any]:
    assert isinstance(answer, Prepared), answer
    return list(as_array(answer.tensors[0], bench.attached.memory).tolist())


def test_what_a_pipeline_needs_is_loaded_before_its_first_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(Doubler, "open", lambda _: opened.append("tools"))
    assert bench.open(model=2) == PipelineOpened(2)
    assert opened == ["tools"]
    assert isinstance(bench.prepare(model=2, slots=[bench.slot(16).ref]), Prepared)
    assert opened == ["tools"], "no job pays for it"


def test_a_pipeline_whose_tools_can_not_be_loaded_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Doubler) -> None:
        raise NotReady("the model's tokenizer.json can't be read")

    monkeypatch.setattr(Doubler, "open", fails)
    assert failure_of(bench.open(model=2)) == ("not_ready", "the model's tokenizer.json can't be read")


# ------------------------------------------------------------------ prepare


def test_the_result_lies_in_the_slot_and_only_its_place_travels(bench: Bench) -> None:
    with bench.slot(16) as slot:
        answer = bench.prepare(slots=[slot.ref])
        assert isinstance(answer, Prepared)
        assert answer.job == 7
        assert answer.tensors == [Tensor("x", "INT32", (1, 4), slot.ref)]
        assert np.frombuffer(slot.view, np.int32).tolist() == [2, 4, 6, 8]
        assert msgspec.msgpack.decode(answer.context) == {"length": 4}
        assert answer.elapsed_s > 0


def test_without_slots_the_result_travels_inline(bench: Bench) -> None:
    answer = bench.prepare()
    assert values_of(answer, bench) == [[2, 4, 6, 8]]
    assert isinstance(answer, Prepared)
    assert isinstance(answer.tensors[0].data, bytes)


def test_a_payload_in_the_arena_is_read_in_place(bench: Bench) -> None:
    with bench.slot(4) as slot:
        slot.view[:] = b"\5\6\7\1"
        assert values_of(bench.prepare(slot.ref), bench) == [[10, 12, 14, 2]]
        seen = bench.pipeline.seen[0].data
        assert isinstance(seen, memoryview)
        assert seen.readonly
        bench.pipeline.seen.clear()


def test_options_are_typed(bench: Bench) -> None:
    assert values_of(bench.prepare(options=msgspec.msgpack.encode({"add": 9})), bench) == [[11, 13, 15, 17]]


def test_an_array_of_the_pipelines_own_is_copied_into_the_slot(bench: Bench) -> None:
    bench.pipeline.act = lambda values: values[None].copy()
    with bench.slot(16) as slot:
        answer = bench.prepare(slots=[slot.ref])
        assert values_of(answer, bench) == [[2, 4, 6, 8]]
        assert isinstance(answer, Prepared)
        assert answer.tensors[0].data == slot.ref


def test_rows_that_do_not_fit_the_slot_travel_inline(bench: Bench) -> None:
    bench.pipeline.act = lambda values: np.stack([values] * 3)
    with bench.slot(16) as slot:
        answer = bench.prepare(slots=[slot.ref])
        assert values_of(answer, bench) == [[2, 4, 6, 8]] * 3
        assert isinstance(answer, Prepared)
        assert isinstance(answer.tensors[0].data, bytes)


def test_a_free_dimension_gets_no_buffer(bench: Bench) -> None:
    bench.pipeline = Doubler(-1)
    bench.open(model=2)
    bench.pipeline.act = lambda values: values[None]
    assert values_of(bench.prepare(b"\1\2\3", model=2), bench) == [[2, 4, 6]]


def test_tensors_of_the_request_are_copied_out_of_the_arena(bench: Bench) -> None:
    with bench.slot(4) as slot:
        slot.view[:] = b"abcd"
        bench.prepare(tensors=[Tensor("t", "UINT8", (4,), slot.ref), Tensor("u", "UINT8", (1,), b"z")])
        assert [tensor.data for tensor in bench.pipeline.seen[0].tensors] == [b"abcd", b"z"]


def test_a_passed_deadline_is_noticed_before_any_work(bench: Bench) -> None:
    code, text = failure_of(bench.prepare(deadline_s=NOW_S))
    assert code == "deadline_exceeded"
    assert "before preparation started" in text
    assert bench.pipeline.seen == []
    assert isinstance(bench.prepare(deadline_s=NOW_S + 0.001), Prepared)


def test_foreseen_failures_pass_as_they_are(bench: Bench) -> None:
    bench.pipeline.act = InvalidInput("too short: 4 of 8 bytes")
    assert failure_of(bench.prepare()) == ("invalid_input", "too short: 4 of 8 bytes")


@pytest.mark.parametrize(
    "error", [ValueError("/secret"), SyntaxError("/secret"), KeyError("/secret"), RecursionError("/secret")]
)
def test_whatever_an_image_makes_a_decoder_raise_is_the_images_fault(bench: Bench, error: Exception) -> None:
    bench.pipeline.act = error
    code, text = failure_of(bench.prepare(kind="image"))
    assert code == "invalid_input"
    assert text == "the image can't be prepared: it is broken or of an unsupported kind"


def test_a_mistake_in_another_pipeline_is_internal(bench: Bench) -> None:
    bench.pipeline.act = ValueError("/secret")
    assert failure_of(bench.prepare()) == ("internal", InternalFault.TEXT)


def test_too_little_memory_names_the_setting(bench: Bench) -> None:
    bench.pipeline.act = MemoryError()
    code, text = failure_of(bench.prepare(kind="image"))
    assert code == "invalid_input"
    assert "pool.memory_bytes" in text


@pytest.mark.parametrize(
    "wrong",
    [
        lambda values: values,  # no row dimension
        lambda values: values[None].astype(np.int64),
        lambda values: values[None, :3],
    ],
)
def test_what_a_pipeline_returns_is_checked_against_its_spec(bench: Bench, wrong: Any) -> None:  # noqa: ANN401 - a function
    bench.pipeline.act = wrong
    assert failure_of(bench.prepare(kind="image"))[0] == "internal"


@pytest.mark.parametrize(
    "ref", [SlotRef(1 << 20, 16), SlotRef(-16, 16), SlotRef(0, 1 << 30), SlotRef((1 << 20) - 8, 16)]
)
def test_places_outside_the_arena_are_refused(bench: Bench, ref: SlotRef) -> None:
    assert failure_of(bench.prepare(ref))[0] == "internal"
    assert failure_of(bench.prepare(slots=[ref], kind="image"))[0] == "internal"
    assert bench.pipeline.seen == []


def test_an_unknown_model_is_internal(bench: Bench) -> None:
    assert failure_of(bench.prepare(model=99))[0] == "internal"


# ------------------------------------------------------------------ finish


def test_finish(bench: Bench) -> None:
    answer = bench.finish()
    assert isinstance(answer, Finished)
    assert answer.job == 8
    assert answer.results == [Embedding(values=[0, 1, 4, 3]), Embedding(values=[2, 3, 4, 3])]


def test_finish_reads_outputs_in_the_arena(bench: Bench) -> None:
    with bench.slot(8) as slot:
        slot.view[:] = np.array([5, 6], np.float32).tobytes()
        answer = bench.finish(tensors=[Tensor("y", "FP32", (1, 2), slot.ref)])
        assert isinstance(answer, Finished)
        assert answer.results == [Embedding(values=[5, 6, 4, 3])]


def test_finish_checks_the_deadline(bench: Bench) -> None:
    assert failure_of(bench.finish(deadline_s=NOW_S))[0] == "deadline_exceeded"


def test_one_result_per_row(bench: Bench) -> None:
    bench.pipeline.act = "too few"
    assert failure_of(bench.finish()) == ("internal", InternalFault.TEXT)


def test_a_failing_postprocess_is_internal(bench: Bench) -> None:
    bench.pipeline.act = ZeroDivisionError("/secret")
    assert failure_of(bench.finish()) == ("internal", InternalFault.TEXT)


def test_outputs_that_are_not_the_specs_are_refused(bench: Bench) -> None:
    wrong = [Tensor("y", "FP32", (2, 3), bytes(24))]
    assert failure_of(bench.finish(tensors=wrong))[0] == "internal"
    assert failure_of(bench.finish(tensors=[]))[0] == "internal"


def test_an_answer_too_big_for_a_message(bench: Bench) -> None:
    job = PrepareJob(7, FOREVER_S, 1, "text", b"", b"", [])
    assert failure_of(bench.stage.too_big(job))[0] == "too_large"


# ------------------------------------------------------------------ open


def test_an_unknown_model_or_version_is_refused(bench: Bench) -> None:
    assert failure_of(bench.open("nobody"))[0] == "unknown_model"
    assert failure_of(bench.open("sim", "0123456789abcdef"))[0] == "unknown_version"


def test_a_version_newer_than_the_process_is_found(bench: Bench, tmp_path: Path) -> None:
    simulated_repository(tmp_path / "models", "newer")
    assert isinstance(bench.open("newer", model=5), PipelineOpened)


def test_a_built_in_pipeline_from_its_repository(tmp_path: Path) -> None:
    arena = Arena.create(1 << 20)
    attached = AttachedArena.attach(arena.fd, arena.nbytes)
    stage = Stage(attached, Repository(simulated_repository(tmp_path / "models")))
    assert stage.open(OpenPipeline(3, "sim", "")) == PipelineOpened(3)
    slot = arena.lease(224 * 224 * 3)
    assert slot is not None
    job = PrepareJob(1, FOREVER_S, 3, "image", encode(photo(300, 300), "JPEG"), msgspec.msgpack.encode({}), [slot.ref])
    answer = stage.prepare(job)
    assert isinstance(answer, Prepared)
    assert answer.tensors == [Tensor("image", "UINT8", (1, 224, 224, 3), slot.ref)]
    assert np.frombuffer(slot.view, np.uint8).std() > 10
    slot.close()
    attached.close()
    arena.close()


def test_a_model_whose_settings_are_wrong_is_refused_in_one_sentence(tmp_path: Path) -> None:
    root = simulated_repository(tmp_path / "models")
    yaml = root / "sim" / "model.yaml"
    yaml.write_text(yaml.read_text().replace("size:", "sise:"))
    arena = Arena.create(1 << 20)
    attached = AttachedArena.attach(arena.fd, arena.nbytes)
    code, text = failure_of(Stage(attached, Repository(root)).open(OpenPipeline(3, "sim", "")))
    assert code == "not_ready"
    assert "sise" in text
    assert TRACE not in text
    attached.close()
    arena.close()
