"""Chooses the tokens of a composed prompt's modules that are recomputed, if the policy asks for it.

Exact modules need none. Of the others, ``linked`` takes the first tokens of each module. The other policies rank the
tokens of all modules together. ``profiled`` ranks by the expected deviation: the module's deviation profile, scaled by
the length of the text before the module. A module without a profile gets as many of its first tokens. ``query``
ranks by the attention of the new text, ``blend`` by the change of keys in this prompt. Both need a pass beforehand.

The pass for ``query`` computes the new text behind the modules against the cached prompt. The pass for ``blend``
computes the modules' tokens at their places, through the first layers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from inlay.kv.identity import TokenRun
from inlay.prompt.composed import CachedSpan, ComposedPrompt, NewSpan, RecomputedOffsets
from inlay.recompute import Recompute

#: By segment key, the deviation of each token. Any scale, the same for all.
Profiles = Mapping[bytes, npt.NDArray[np.float16]]

#: By the module's start in the prompt, the weight of each token, (tokens,). Any scale.
Scores = Mapping[int, npt.NDArray[np.floating]]


#: Deviations grow as a power of the number of preceding tokens unseen by the encoding (docs/internals/results.md).
_EXPONENT = 0.25


@dataclass(frozen=True, slots=True)
class RecomputedTokens:
    """The recomputed tokens of a composed prompt.

    Attributes:
        offsets: by the start of each part, the offsets of its chosen tokens.
        tokens: their number.
        linked: how many of them are first tokens, chosen without scores.
        unprofiled: True if a module had no profile and the policy would have used one.
    """

    offsets: RecomputedOffsets
    tokens: int = 0
    linked: int = 0
    unprofiled: bool = False


def choose_tokens(
    recompute: Recompute | None,
    composed: ComposedPrompt,
    profiles: Profiles,
    scores: Scores | None = None,
    unprofiled: Recompute | None = None,
) -> RecomputedTokens:
    """Choose the tokens of a composed prompt that a policy recomputes.

    A share counts all tokens of inexact modules.

    Args:
        recompute: None for no recomputation.
        composed: the prompt without recomputed tokens. Its last token is computed in any case.
        profiles: see ``Profiles``.
        scores: the scores of a pass, for all inexact modules, if the policy needs them.
        unprofiled: see ReusePolicy.
    """
    modules = inexact_modules(composed)
    if recompute is None or not modules:
        return RecomputedTokens({})
    expected = expected_deviations(composed, profiles) if recompute.profiled else {}
    matters = _scores(modules, expected, scores or {}) if recompute.by_attention or recompute.by_keys else expected
    missing = (
        {part.start for part in modules if part.spec.lossless.key not in profiles} if recompute.profiled else set()
    )
    first = {part.start for part in modules if part.start not in matters} | (missing if unprofiled else set())
    known = [part for part in modules if part.start not in first]
    others = unprofiled or recompute
    linked = {part.start: tuple(range(others.tokens(part.length))) for part in modules if part.start in first}
    chosen = {**linked, **_most(known, recompute, matters)}
    offsets = {start: some for start, some in chosen.items() if some}
    wants_profiles = recompute.amount > 0 and bool(missing)
    return RecomputedTokens(offsets, sum(map(len, offsets.values())), sum(map(len, linked.values())), wants_profiles)


def inexact_modules(composed: ComposedPrompt) -> list[CachedSpan]:
    """The modules that were encoded under another context than that of a full prefill."""
    return [part for part in composed if isinstance(part, CachedSpan) and not part.exact]


def expected_deviations(composed: ComposedPrompt, profiles: Profiles) -> dict[int, npt.NDArray[np.floating]]:
    """By start, the expected deviation of each token of the modules that have a profile, (tokens,). Any scale.

    Profiles were made behind samples of equal length. So each is scaled by a power of the text length before the
    module.
    """
    moves, before = {}, 0
    for part in composed:
        if isinstance(part, CachedSpan) and not part.exact and part.spec.lossless.key in profiles:
            moved = profiles[part.spec.lossless.key][: part.length].astype(np.float32)
            moves[part.start] = moved * max(1, before - part.spec.before.tokens) ** _EXPONENT
        before += part.length if isinstance(part, CachedSpan) else len(part.ids)
    return moves


def _scores(modules: list[CachedSpan], known: Scores, scores: Scores) -> Scores:
    """By start, the scores of the pass, times the profile where there are profiles.

    A module without a profile gets the mean of all others. Without a pass, scores are 0: all tokens are chosen, or
    none.
    known: see ``expected_deviations``.
    """
    found = {part.start: scores.get(part.start, np.zeros(part.length))[: part.length] for part in modules}
    if not known:
        return found
    mean = np.concatenate(list(known.values())).mean(dtype=np.float64)
    return {start: own * known.get(start, mean) for start, own in found.items()}


def _most(modules: list[CachedSpan], recompute: Recompute, matters: Scores) -> dict[int, tuple[int, ...]]:
    """The best tokens of all these modules together. Of equal tokens, the earlier one wins."""
    if not modules:
        return {}
    scores = np.concatenate([matters[part.start][: part.length] for part in modules])
    most = np.argsort(-scores, kind="stable")[: recompute.tokens(scores.size)]
    of = np.zeros(scores.size, dtype=bool)
    of[most] = True
    borders = np.cumsum([part.length for part in modules])[:-1]
    return {
        part.start: tuple(np.flatnonzero(own).tolist())
        for part, own in zip(modules, np.split(of, borders), strict=True)
    }


#: The most tokens at a prompt's end whose attention chooses tokens.
MOST_ROWS = 256


def selection_prompt(recompute: Recompute | None, composed: ComposedPrompt) -> ComposedPrompt | None:
    """Return the composed prompt of that pass; None if the choice needs none. ``composed`` has no recomputed tokens."""
    if recompute is None or not recompute.selects or not inexact_modules(composed):
        return None
    return tuple(_checked(composed)) if recompute.by_keys else _asking(composed)


def _asking(composed: ComposedPrompt) -> ComposedPrompt:
    """Compute the last tokens even if they are stored, and do not store them."""
    last = composed[-1]
    assert isinstance(last, NewSpan), "somebody computes the last token of a prompt"
    rows = min(len(last.ids), MOST_ROWS)
    before = len(last.ids) - rows
    asking = NewSpan(last.ids[before:], last.start + before)
    if not before:
        return (*composed[:-1], asking)
    run = None if last.run is None else TokenRun(last.ids[:before], last.start, last.run.before, last.run.continues)
    return (*composed[:-1], NewSpan(last.ids[:before], last.start, run), asking)


def _checked(composed: ComposedPrompt) -> Iterator[CachedSpan | NewSpan]:
    """Read each module up to the last inexact one for comparison, and compute it in place.

    The request's own text is not stored either, because the upper layers do not run.
    """
    last = composed.index(inexact_modules(composed)[-1])
    for part in composed[: last + 1]:
        if isinstance(part, NewSpan):
            yield replace(part, run=None)
        elif isinstance(part, CachedSpan) and part.exact:
            yield part
        elif isinstance(part, CachedSpan):
            first, end = part.first, part.first + part.length
            yield replace(part, left_out=tuple(range(first, end)))
            yield NewSpan(part.spec.ids[first:end], part.start)
