"""Which tokens of a splice's modules are computed anew, where a policy asks for a repair.

What is exact needs none. All others are chosen among: the first tokens of each module (``linked``), or of all modules
together those that matter most. Profiles that were made when modules were encoded say how much tokens move when other
text stands before them (``profiled``), and how much stands before a module here says how much of that to expect; a
module without a profile gets as many of its first tokens. What the new text attends to (``query``), and how keys
change in this very prompt (``blend``), a pass has found out before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inlay.prompt.composed import CachedSpan, ComposedPrompt, RecomputedOffsets
from inlay.recompute import Recompute

#: How much each token of a segment moves, by the segment's key; any scale, the same for all.
Profiles = Mapping[bytes, npt.NDArray[np.float16]]

#: How much each token of a module matters in one prompt, (tokens,), by where the module starts in it; any scale.
Scores = Mapping[int, npt.NDArray[np.floating]]


#: Tokens move as a power of how many stand before them that their encoding has not seen (docs/quality.md).
_EXPONENT = 0.25


@dataclass(frozen=True, slots=True)
class Choice:
    """What is computed anew of a splice.

    offsets: of the chosen tokens in each part of the prompt, by where that starts.
    tokens: how many they are. linked: how many of them are the first ones of their module. unprofiled: whether a module
    had no profile that would have had a say, be it that so few of its first tokens are none.
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
) -> Choice:
    """What of a splice a policy has computed anew. splice: without any repair; its last token is computed in any case.

    A share is one of all tokens that are read from modules under another context than theirs here.
    scores: what a pass has found out, where the policy needs one; it covers all of these. unprofiled: see ReusePolicy.
    """
    modules = inexact_modules(composed)
    if recompute is None or not modules:
        return Choice({})
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
    return Choice(offsets, sum(map(len, offsets.values())), sum(map(len, linked.values())), wants_profiles)


def inexact_modules(composed: ComposedPrompt) -> list[CachedSpan]:
    """What a splice reads under another context than that of a full prefill."""
    return [part for part in composed if isinstance(part, CachedSpan) and not part.exact]


def expected_deviations(composed: ComposedPrompt, profiles: Profiles) -> dict[int, npt.NDArray[np.floating]]:
    """How much each token of the modules that have a profile is expected to move here, (tokens,) in any scale, by where
    they start: as much as behind the samples that profiles were made behind, which are alike for all, but for how
    many tokens stand before it.
    """
    moves, before = {}, 0
    for part in composed:
        if isinstance(part, CachedSpan) and not part.exact and part.spec.lossless.key in profiles:
            moved = profiles[part.spec.lossless.key][: part.length].astype(np.float32)
            moves[part.start] = moved * max(1, before - part.spec.before.tokens) ** _EXPONENT
        before += part.length if isinstance(part, CachedSpan) else len(part.ids)
    return moves


def _scores(modules: list[CachedSpan], known: Scores, scores: Scores) -> Scores:
    """Of each module what the pass has found, times its profile where that says something, too.

    Without one it moves as the others do in the mean. Where no pass was needed, all tokens are chosen, or none.
    known: see ``expected_deviations``.
    """
    found = {part.start: scores.get(part.start, np.zeros(part.length))[: part.length] for part in modules}
    if not known:
        return found
    mean = np.concatenate(list(known.values())).mean(dtype=np.float64)
    return {start: own * known.get(start, mean) for start, own in found.items()}


def _most(modules: list[CachedSpan], recompute: Recompute, matters: Scores) -> dict[int, tuple[int, ...]]:
    """Of all these modules' tokens those that matter most; of two alike the one that stands first."""
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
