"""How many prompt tokens a pass may have, for passes whose time is a formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inlay.engine.pass_cost import FLOOR, GROUP, LONE, PassBudget

MOST = 4096


def run(
    budget: PassBudget, passes: int, cost: Callable[[int], float], prompt: int = MOST, *, lone: bool = False
) -> list[tuple[int, float]]:
    """The tokens and seconds of so many passes; a prompt is never shorter than the rest of the budget."""
    made = []
    for _ in range(passes):
        tokens = min(budget.tokens(MOST, lone=lone), prompt)
        budget.took(tokens, cost(tokens), lone=lone)
        made.append((tokens, cost(tokens)))
    return made


def linear(fixed: float, a_token: float) -> Callable[[int], float]:
    return lambda tokens: fixed + a_token * tokens


@pytest.mark.parametrize("fixed", [0.0, 0.03, 0.15])
@pytest.mark.parametrize("a_token", [0.0001, 0.0005, 0.0025])
def test_passes_grow_to_the_time_limit_and_stay_below(fixed: float, a_token: float):
    made = run(PassBudget(0.25), 24, linear(fixed, a_token))
    assert made[0][0] == FLOOR
    assert all(seconds <= 0.25 + a_token * GROUP / 2 for _, seconds in made)
    right = min(MOST, (0.25 - fixed) / a_token)
    assert made[-1][0] == pytest.approx(right, rel=0.05, abs=GROUP)


@pytest.mark.parametrize("fixed", [0.0, 0.03, 0.15])
@pytest.mark.parametrize("a_token", [0.0005, 0.0025])
def test_passes_of_a_lone_request_take_longer_and_soon_shrink_when_another_comes(fixed: float, a_token: float):
    budget, cost = PassBudget(0.25), linear(fixed, a_token)
    made = run(budget, 24, cost, lone=True)
    assert all(seconds <= LONE * 0.25 + a_token * GROUP / 2 for _, seconds in made)
    right = min(MOST, (LONE * 0.25 - fixed) / a_token)
    assert made[-1][0] == pytest.approx(right, rel=0.05, abs=GROUP * LONE)
    shared = [seconds for _, seconds in run(budget, 12, cost)]
    assert shared[0] <= 2 * 0.25  # the fixed time weighs more in a shorter pass
    assert shared[-1] <= 0.25 + a_token * GROUP / 2


def test_lone_request_of_a_slow_model_gets_the_smallest_pass():
    assert [tokens for tokens, _ in run(PassBudget(0.25), 6, linear(1.0, 0.1), lone=True)][1:] == [FLOOR] * 5


def test_passes_are_whole_groups_of_rows():
    made = run(PassBudget(0.25), 24, linear(0.01, 0.0023))
    assert {tokens % GROUP for tokens, _ in made} == {0}


def test_pass_grows_at_most_fourfold():
    sizes = [tokens for tokens, _ in run(PassBudget(0.25), 5, linear(0, 1e-6))]
    assert sizes == [32, 128, 512, 2048, 4096]


def test_slow_model_gets_the_smallest_pass():
    assert [tokens for tokens, _ in run(PassBudget(0.25), 5, linear(1.0, 0.1))] == [FLOOR] * 5


def test_callers_limit_is_respected():
    budget = PassBudget(0.25)
    assert (budget.tokens(5), budget.tokens(MOST)) == (5, FLOOR)


def test_pass_is_unbounded_without_a_time_limit():
    budget = PassBudget(None)
    budget.took(100, 60.0)
    assert budget.tokens(MOST) == MOST


def test_passes_shrink_while_a_context_grows():
    """A token's attention costs as much as all else of it 2,000 tokens later."""
    budget, context, times = PassBudget(0.25), 0, []
    while context < 8000:
        tokens, a_token = budget.tokens(MOST), 0.001 * (1 + context / 2000)
        seconds = 0.01 + tokens * a_token + 0.001 * tokens**2 / 4000
        budget.took(tokens, seconds)
        times.append((seconds, a_token * GROUP / 2))
        context += tokens
    assert all(seconds < 0.25 * 1.15 + half_a_group for seconds, half_a_group in times)
    assert all(seconds > 0.25 * 0.85 - half_a_group for seconds, half_a_group in times[4:])


def test_short_prompts_do_not_shrink_long_passes():
    budget = PassBudget(0.25)
    long = run(budget, 12, linear(0.05, 0.001))[-1][0]
    run(budget, 50, linear(0.05, 0.001), prompt=3)
    assert budget.tokens(MOST) >= long
    budget.took(0, 9.0)  # answers alone
    assert budget.tokens(MOST) >= long


def test_added_answers_shrink_the_prompt_budget():
    budget = PassBudget(0.25)
    run(budget, 12, linear(0.05, 0.001))
    seconds = [seconds for _, seconds in run(budget, 12, linear(0.2, 0.001))]
    assert max(seconds[3:]) < 0.25 * 1.15
    assert seconds[-1] <= 0.25 + 0.001 * GROUP  # half a group too many, and a row more in the estimate
    assert run(budget, 12, linear(0.05, 0.001))[-1][0] == pytest.approx(200, rel=0.05)


def test_one_stalled_pass_costs_a_few_short_ones():
    budget, cost = PassBudget(0.25), linear(0.05, 0.001)
    before = run(budget, 12, cost)[-1][0]
    budget.took(before, 20.0)
    assert budget.tokens(MOST) == FLOOR
    assert run(budget, 5, cost)[-1][0] > 0.9 * before
