"""The guard against simulated canaries: rarely wrong about good ones, quick about bad ones."""

from typing import NamedTuple

import numpy as np
import pytest

from gateway.guard import CLEARLY_BAD, MOST_ENDED, STRETCH, Guard, Pair, Verdict, is_fault
from shared.errors import Code
from shared.settings_base import GuardSettings
from tests.support.simulation import repeatable

OLD, NEW = "a" * 16, "b" * 16
SETTINGS = GuardSettings()


class Behaviour(NamedTuple):
    """Shares of bad outcomes, and how much slower batches are than predicted."""

    errors: float = 0.0
    nonfinite: float = 0.0
    times: float = 1.0
    disagrees: float = 0.0


GOOD = Behaviour()


class Run(NamedTuple):
    """What became of a simulated canary."""

    verdict: Verdict | None
    answers: int
    """Of the canary, when the guard spoke."""


def simulate(
    guard: Guard,
    canary: Behaviour,
    current: Behaviour = GOOD,
    requests: int = 2000,
    share: float = 0.2,
    seed: int = 1,
    *,
    shadow: bool = False,
) -> Run:
    """Requests one after another, each a batch of its own; the guard is asked after each of the canary's."""
    random, answers = repeatable(seed).random, 0
    for _ in range(requests):
        to_canary = random() < share
        version, how = (NEW, canary) if to_canary else (OLD, current)
        code = Code.INTERNAL if random() < how.errors else None
        guard.observed(version, code, 0.01, nonfinite_rows=int(how.nonfinite > 0 and random() < how.nonfinite))
        guard.ran(version, 0.005 * how.times, 0.005)
        if not to_canary:
            continue
        answers += 1
        if shadow:
            guard.compared(agrees=random() >= how.disagrees)
        verdict = guard.verdict()
        if verdict is not None:
            return Run(verdict, answers)
    return Run(None, answers)


def guard(*, shadow: bool = False, gateways: int = 1, **changed: float) -> Guard:
    return Guard(GuardSettings.model_validate({**SETTINGS.model_dump(), **changed}), gateways, Pair(OLD, NEW, shadow))


def condemned(errors: float, seed: int) -> bool:
    """Whether a canary with as many errors as the current version is rolled back, within 2000 requests."""
    random = np.random.default_rng(seed)
    to_canary, fails = random.random(2000) < 0.2, random.random(2000) < errors
    judge = guard(false_alarm=0.01)
    for version, code in zip(
        np.where(to_canary, NEW, OLD).tolist(), np.where(fails, Code.INTERNAL, None).tolist(), strict=True
    ):
        judge.observed(version, code, 0.0)
        if version == NEW and judge.verdict() is not None:
            return True
    return False


@pytest.mark.parametrize(("errors", "canaries"), [(0.03, 1000), (0.1, 300)])
def test_a_canary_that_is_as_good_is_hardly_ever_condemned(errors: float, canaries: int) -> None:
    """A chance of 1 % is allowed, so of 1000 canaries at most ten."""
    assert sum(condemned(errors, seed) for seed in range(canaries)) <= canaries / 100


@pytest.mark.parametrize(
    ("canary", "shadow", "says"),
    [
        (Behaviour(errors=1), False, "error rate 100 % of 20 answers, the current version's is 0 % of"),
        (Behaviour(nonfinite=1), False, "non-finite rate 100 % of 20 answers, the current version's is 0 % of"),
        (Behaviour(times=10), False, "slow batches 100 % of 20 (over 2 times what the current version needs), the"),
        (Behaviour(disagrees=1), True, "disagreement 100 % of 20 copies, 10 % are allowed"),
        (Behaviour(errors=1), True, "error rate 100 % of 20 answers"),
    ],
)
@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("gateways", [1, 8])
def test_what_fails_altogether_ends_with_its_minimum_of_answers(
    canary: Behaviour, shadow: bool, says: str, share: float, gateways: int
) -> None:
    run = simulate(guard(shadow=shadow, gateways=gateways), canary, share=share, requests=20_000, shadow=shadow)
    assert run.answers == SETTINGS.min_samples
    assert run.verdict is not None
    assert run.verdict.reason.startswith(says)


@pytest.mark.parametrize(
    ("canary", "current", "within"),
    [
        (Behaviour(errors=0.5), GOOD, 40),
        (Behaviour(errors=0.2), Behaviour(errors=0.01), 200),
        (Behaviour(errors=0.06), Behaviour(errors=0.02), 1500),  # three times as many errors
        (Behaviour(nonfinite=0.1), GOOD, 300),
    ],
)
def test_what_fails_now_and_then_is_found(canary: Behaviour, current: Behaviour, within: int) -> None:
    for seed in range(20):
        run = simulate(guard(), canary, current, share=0.1, requests=40_000, seed=seed)
        assert run.verdict is not None
        assert run.answers <= within


def test_a_shadow_that_disagrees_more_often_than_a_version_trained_anew_is_found() -> None:
    assert simulate(guard(shadow=True), Behaviour(disagrees=0.05), shadow=True).verdict is None
    run = simulate(guard(shadow=True), Behaviour(disagrees=0.4), shadow=True)
    assert run.answers <= 100
    assert run.verdict is not None
    assert run.verdict.figures["measure"] == "disagreement"


def test_a_bad_current_version_does_not_condemn_an_equal_canary() -> None:
    everything_fails = Behaviour(errors=1, nonfinite=1, times=10)
    assert simulate(guard(), everything_fails, everything_fails).verdict is None


def test_a_canary_below_the_floor_is_left_alone() -> None:
    assert simulate(guard(), Behaviour(errors=0.015), requests=30_000).verdict is None


def test_a_long_good_past_does_not_hide_a_bad_present() -> None:
    judge = guard()
    good = simulate(judge, GOOD, requests=5 * STRETCH, share=0.5)
    assert good.verdict is None
    bad = simulate(judge, Behaviour(errors=1), requests=5 * STRETCH, share=0.5)
    assert bad.verdict is not None
    assert bad.answers <= 150
    assert judge.figures()[1].requests == good.answers + bad.answers


def test_trouble_that_comes_over_both_while_the_share_grows_is_not_the_canarys() -> None:
    judge, trouble = guard(), Behaviour(errors=0.1)
    assert simulate(judge, GOOD, share=0.05, requests=4000).verdict is None
    judge.restart()
    assert simulate(judge, trouble, trouble, share=0.5, requests=4000).verdict is None


def test_a_quiet_current_version_is_no_excuse_for_what_is_clearly_bad() -> None:
    assert simulate(guard(), Behaviour(errors=1), share=1.0).answers == SETTINGS.min_samples
    assert simulate(guard(), Behaviour(errors=CLEARLY_BAD / 2), share=1.0, requests=500).verdict is None


def test_a_current_version_that_failed_its_few_requests_too_is_an_excuse() -> None:
    judge = guard()
    for _ in range(5):
        judge.observed(OLD, Code.INTERNAL, 0.01)
    assert simulate(judge, Behaviour(errors=1), share=1.0).verdict is None


def test_one_slow_batch_of_many_requests_is_one_sign() -> None:
    judge = guard()
    for _ in range(100):
        judge.observed(OLD, None, 0.01)
        judge.ran(OLD, 0.005, 0.005)
        judge.observed(NEW, None, 0.01)
    judge.ran(NEW, 5.0, 0.005)
    assert judge.verdict() is None


def test_without_a_prediction_no_batch_is_slow() -> None:
    judge = guard()
    for _ in range(100):
        judge.observed(NEW, None, 0.01)
        judge.ran(NEW, 5.0, 0.0)
        judge.ran(NEW, 5.0, float("nan"))
    assert judge.verdict() is None
    assert judge.figures()[1].batches == 0


def test_switched_off_it_only_counts() -> None:
    judge = guard(enabled=False)
    assert simulate(judge, Behaviour(errors=1)).verdict is None
    assert judge.figures()[1].errors > 100


def test_more_gateways_ask_for_more_evidence() -> None:
    answers = [simulate(guard(gateways=n), Behaviour(errors=0.3), requests=20_000).answers for n in (1, 1000)]
    assert answers[0] < answers[1]


def test_the_figures_of_both() -> None:
    judge = guard(shadow=True)
    for _ in range(3):
        judge.observed(OLD, None, 0.010)
    judge.observed(NEW, None, 0.1, nonfinite_rows=2)
    judge.observed(NEW, Code.NONFINITE_OUTPUT, 0.1)
    judge.observed(NEW, Code.INVALID_INPUT, 0.1)
    judge.observed("c" * 16, Code.INTERNAL, 0.1)
    judge.ran(NEW, 0.02, 0.005)
    judge.ran("c" * 16, 0.02, 0.005)
    judge.compared(agrees=False)
    current, canary = judge.figures()
    assert (current.version, current.role, current.requests, current.errors) == (OLD, "current", 3, 0)
    assert (canary.version, canary.role) == (NEW, "shadow")
    assert (canary.requests, canary.errors, canary.nonfinite) == (2, 1, 2)
    assert (canary.slow, canary.batches, canary.compared, canary.disagreed) == (1, 1, 1, 1)
    assert current.p50_ms == pytest.approx(10, rel=0.07)
    assert canary.p99_ms == pytest.approx(100, rel=0.07)


def test_a_verdict_says_what_it_rests_on() -> None:
    verdict = simulate(guard(), Behaviour(errors=1), share=0.05).verdict
    assert verdict is not None
    figures = verdict.figures
    assert (figures["measure"], figures["canary_rate"], figures["canary_total"]) == ("error rate", 1.0, 20)
    assert float(figures["log10_evidence"]) >= float(figures["log10_needed"]) > 3
    assert 0.02 <= float(figures["allowed_rate"]) < 0.2


def test_workers_that_are_ended_by_inputs_of_both_are_nobodys_fault_and_old_ones_are_forgotten() -> None:
    judge = guard()
    judge.ended_workers(OLD, 2)
    judge.ended_workers(NEW, MOST_ENDED + 1)
    judge.ended_workers("c" * 16, 9)
    assert judge.verdict() is None
    judge.ended_workers(NEW, 1)
    verdict = judge.verdict()
    assert verdict is not None
    assert (verdict.figures["canary_inputs"], verdict.figures["current_inputs"]) == (5, 2)
    judge.restart()
    judge.ended_workers(NEW, MOST_ENDED - 1)
    assert judge.verdict() is None
    off = guard(enabled=False)
    off.ended_workers(NEW, MOST_ENDED)
    assert off.verdict() is None


@pytest.mark.parametrize("code", Code)
def test_only_server_and_model_are_at_fault(code: Code) -> None:
    ours = {Code.INTERNAL, Code.NONFINITE_OUTPUT, Code.PROCESS_LOST, Code.MODEL_DISABLED, Code.DEADLINE_EXCEEDED}
    assert is_fault(code, admitted=True) is (True if code in ours else None)
    assert is_fault(None, admitted=True) is False


def test_a_deadline_that_could_not_be_met_from_the_start_is_nobodys_fault() -> None:
    assert is_fault(Code.DEADLINE_EXCEEDED, admitted=False) is None
