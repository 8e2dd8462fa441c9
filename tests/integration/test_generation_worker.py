"""Texts from a worker process: real greeting, socket, loading and network; the test says what a gateway sends."""

from pathlib import Path
from random import Random

from shared.clock import now_s
from shared.errors import Code, ExitCode
from shared.generation_messages import CancelJobs, Generated
from shared.messages import BatchDone, MemoryNote, ModelFailed, UnloadModel
from shared.messages import LoadModel as Load
from shared.results import FinishReason
from tests.support.desk import text_of
from tests.support.fake_gateway import gateway_in, greeted
from tests.support.generating_worker import generate, generating, outcomes, over
from tests.support.tiny_llama import NOT_A_NUMBER, POISON, TinyLlama, greedy
from tests.support.worker_parts import batch, item
from tests.support.worker_process import load, simulated, worker_in

GOOD = [1, 3, 11]
"""Neither this nor what a tiny network makes of it has a token that it can't stand."""


async def test_a_text_comes_piece_by_piece_and_is_what_the_network_says(tmp_path: Path) -> None:
    version = generating(tmp_path)
    async with worker_in(tmp_path) as worker, gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        loaded = await load(gateway, "texts", version)
        limits = loaded.generation
        assert limits is not None
        assert (limits.sequences, limits.tokens) == (4, 192)
        assert limits.step_s > 0
        assert limits.prefill_s_per_token > 0
        network = TinyLlama()
        weights = sum(parameter.nbytes for parameter in network.parameters())
        assert loaded.memory_bytes == weights + 192 * network.token_bytes, "the cache counts before it is used"
        gateway.send(generate(7, [1, 2, 3], max_tokens=12))
        text = (await over(gateway, 7))[7]
        assert text.text == text_of(greedy(network, [1, 2, 3], 12))
        assert text.end is not None
        assert (text.end.reason, text.end.prompt_tokens, text.end.completion_tokens) == (FinishReason.LENGTH, 3, 12)
        assert text.pieces == 12
        worker.process.terminate()
        assert await worker.exit_code() == ExitCode.OK


async def test_many_texts_at_once_are_each_what_they_would_be_alone(tmp_path: Path) -> None:
    version = generating(tmp_path)
    random, network = Random(5), TinyLlama()  # noqa: S311 - not for secrets
    asked = {
        job: ([random.randrange(60) for _ in range(random.randrange(1, 30))], random.randrange(1, 25))
        for job in range(30)
    }
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        await load(gateway, "texts", version)
        for job, (prompt, count) in asked.items():
            gateway.send(generate(job, prompt, max_tokens=count))
        found = await over(gateway, *asked)
    for job, (prompt, count) in asked.items():
        assert found[job].text == text_of(greedy(network, prompt, count)), (prompt, count)


async def test_a_bad_text_and_one_whose_caller_leaves_change_nothing_for_others(tmp_path: Path) -> None:
    version = generating(tmp_path, network="tests.support.tiny_llama:Touchy", tokens=256)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        await load(gateway, "texts", version)
        gateway.send(generate(1, GOOD, max_tokens=40))
        gateway.send(generate(2, [4, POISON, 5], max_tokens=40))
        gateway.send(generate(3, [4, NOT_A_NUMBER, 5], max_tokens=40))
        gateway.send(generate(4, [9, 9], max_tokens=40))
        gateway.send(CancelJobs([4, 77]))
        gateway.send(generate(5, [1], deadline_s=now_s() - 1))
        gateway.send(generate(6, [1], model=99))
        gateway.send(generate(8, []))
        gateway.send(generate(9, [1] * 48))
        found = await over(gateway, 1, 2, 3, 4, 5, 6, 8, 9)
    codes = {job: outcome.failure.code for job, outcome in found.items() if outcome.failure is not None}
    assert codes == {
        2: Code.INTERNAL,
        3: Code.NONFINITE_OUTPUT,
        4: Code.CANCELLED,
        5: Code.DEADLINE_EXCEEDED,
        6: Code.NOT_READY,
        8: Code.INVALID_INPUT,
        9: Code.INVALID_INPUT,
    }
    assert found[1].text == text_of(greedy(TinyLlama(), GOOD, 40))


async def test_batches_of_another_model_and_texts_take_turns(tmp_path: Path) -> None:
    texts, sim = generating(tmp_path), simulated(tmp_path, a_ms=2)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        await load(gateway, "texts", texts, model=1)
        await load(gateway, "sim", sim, model=2)
        gateway.send(generate(1, [1, 2, 3], max_tokens=40))
        for number in range(20):
            gateway.send(batch(item(number, 5), model=2, number=number))
        await over(gateway, 1)
        await gateway.many(BatchDone, 20)
        kinds = "".join({Generated: "g", BatchDone: "b"}.get(type(message), "") for message in gateway.received).strip(
            "g"
        )
    assert kinds.count("b") == 20
    assert "g" in kinds, "no step between the first batch and the last one"
    assert "bbbbbbbbbb" not in kinds, "texts wait while batches run"


async def test_an_unloaded_version_ends_its_texts_and_goes_then(tmp_path: Path) -> None:
    version = generating(tmp_path, network="tests.support.tiny_llama:Slow")
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        await load(gateway, "texts", version)
        gateway.send(generate(1, [1, 2, 3], max_tokens=40))
        await gateway.next(Generated)
        gateway.send(UnloadModel(1))
        gateway.send(generate(2, [1, 2, 3]))
        found = await over(gateway, 1, 2)
        assert found[1].text == text_of(greedy(TinyLlama(), [1, 2, 3], 40))
        assert found[2].failure is not None
        assert found[2].failure.code == Code.NOT_READY

        def gone() -> list[int]:
            notes = [(at, note) for at, note in enumerate(gateway.received) if isinstance(note, MemoryNote)]
            return [at for at, note in notes if note.expected_bytes]

        await gateway.until(gone, "its memory back")
        last = max(at for at, message in enumerate(gateway.received) if isinstance(message, Generated))
        assert last < gone()[0], "it went while a text was under way"


async def test_sigterm_ends_texts_with_a_failure_each(tmp_path: Path) -> None:
    version = generating(tmp_path, network="tests.support.tiny_llama:Slow", tokens=256)
    async with worker_in(tmp_path) as worker, gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        await load(gateway, "texts", version)
        for job in range(6):
            gateway.send(generate(job, [1, 2, 3], max_tokens=40))
        await gateway.next(Generated)
        worker.process.terminate()
        assert await worker.exit_code() == ExitCode.OK
        found = await over(gateway, *range(6))
    assert {outcome.failure.code for outcome in found.values() if outcome.failure} == {Code.DRAINING}


async def test_a_gateway_s_end_drops_its_texts_and_leaves_those_of_others(tmp_path: Path) -> None:
    version = generating(tmp_path, network="tests.support.tiny_llama:Slow", tokens=256)
    async with worker_in(tmp_path, gateways=2), gateway_in(tmp_path / "run") as stays:
        await greeted(stays)
        await load(stays, "texts", version)
        async with gateway_in(tmp_path / "run", 1) as leaves:
            await greeted(leaves)
            await load(leaves, "texts", version)
            for job in range(8):
                leaves.send(generate(job, [1, 2, 3], max_tokens=40))
            await leaves.next(Generated)
            stays.send(generate(1, [5, 9, 1], max_tokens=20))
        found = await over(stays, 1)
        assert found[1].text == text_of(greedy(TinyLlama(), [5, 9, 1], 20))


async def test_a_model_that_does_not_generate_says_so(tmp_path: Path) -> None:
    version = simulated(tmp_path)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        await load(gateway, "sim", version)
        gateway.send(generate(1, [1]))
        failure = (await over(gateway, 1))[1].failure
        assert failure is not None
        assert failure.code == Code.UNSUPPORTED
        assert outcomes(gateway)[1].pieces == 1


async def test_what_can_not_generate_is_refused_with_a_sentence(tmp_path: Path) -> None:
    far = generating(tmp_path, "far", context=49)
    async with worker_in(tmp_path), gateway_in(tmp_path / "run") as gateway:
        await greeted(gateway)
        gateway.send(Load(1, "far", far))
        failed = await gateway.next(ModelFailed)
    assert failed.failure.text.endswith(": preprocessing.context is 49, but its network takes 48 tokens")
