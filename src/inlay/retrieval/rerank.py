"""The choice between texts of nearly equal relevance, with a bound on the lost relevance."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf, isnan

from inlay.errors import ParameterError
from inlay.retrieval.score import Scorer


def choose_cached(
    texts: Sequence[str], relevance: Sequence[float], scorer: Scorer, *, epsilon: float, most: int
) -> list[int]:
    """Choose texts as ``rerank`` does, with their value from a scorer. It is asked about open choices only.

    A text that is more than ``epsilon`` less relevant than the last place cannot be chosen. If no more texts than
    places are left, the scorer is not asked.

    Args:
        texts: candidates, such as retrieved documents.
        scorer: such as CacheScorer.
        relevance, epsilon, most: see ``rerank``.

    Returns:
        Indices of the chosen texts, by falling relevance.

    Raises:
        ParameterError: see ``rerank``.
    """
    value = [0.0] * len(texts)
    rerank(relevance, value, epsilon=epsilon, most=most)  # checks all
    places = sorted(relevance, reverse=True)[:most]
    open_to = [index for index, each in enumerate(relevance) if places and each >= _least(places[-1], epsilon)]
    if len(open_to) > len(places):
        for index, scored in zip(open_to, scorer([texts[index] for index in open_to]), strict=True):
            value[index] = scored
    return rerank(relevance, value, epsilon=epsilon, most=most)


def rerank(relevance: Sequence[float], value: Sequence[float], *, epsilon: float, most: int) -> list[int]:
    """Choose texts, the most relevant first; within ``epsilon``, prefer texts of high value.

    The text at place i is at most ``epsilon`` less relevant than the i-th most relevant text. Among all choices with
    this bound, the result has the highest sum of values. A place may take every text that an earlier place could take.
    So the best open text at each place is optimal.

    Args:
        relevance: one number per text, in the retriever's unit. Higher is better.
        value: one number per text, such as the seconds that its stored KV saves.
        epsilon: the most relevance to lose at a place, in the unit of ``relevance``. 0 keeps the retriever's choice.
        most: the number of texts to choose. All texts, if there are fewer.

    Returns:
        Indices of the chosen texts, by falling relevance.

    Raises:
        ParameterError: the lists differ in length, a number is NaN, or ``epsilon`` or ``most`` is negative.
    """
    if len(relevance) != len(value):
        raise ParameterError(
            f"there are {len(relevance)} relevances and {len(value)} values; give one of each for every text",
            code="retrieval.wrong_setting",
        )
    if not epsilon >= 0 or most < 0:
        raise ParameterError(
            f"epsilon is {epsilon} and most is {most}; give numbers that are not negative",
            code="retrieval.wrong_setting",
        )
    for name, numbers in (("relevance", relevance), ("value", value)):
        if (wrong := next((place for place, number in enumerate(numbers) if isnan(number)), None)) is not None:
            raise ParameterError(
                f"{name}[{wrong}] is NaN; give a number for every text", code="retrieval.wrong_setting"
            )
    ranked = sorted(range(len(relevance)), key=lambda index: -relevance[index])
    chosen: list[int] = []
    # Texts that this place may take, and no earlier place took: the best one first, by value, then by rank.
    open_to: list[tuple[float, int]] = []
    at = 0
    for place in range(min(most, len(ranked))):
        least = _least(relevance[ranked[place]], epsilon)
        while at < len(ranked) and relevance[ranked[at]] >= least:
            heappush(open_to, (-value[ranked[at]], at))
            at += 1
        chosen.append(ranked[heappop(open_to)[1]])
    return sorted(chosen, key=lambda index: (-relevance[index], index))


def _least(relevance: float, epsilon: float) -> float:
    """Return the least relevance within ``epsilon`` of this one."""
    return -inf if epsilon == inf else relevance - epsilon
