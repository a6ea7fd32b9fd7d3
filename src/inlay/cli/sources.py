"""Where the tokens of a prompt's documents come from: the cache, with the tier, or the reason why they are missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.types import Scope, Usage
from inlay.wording import counted

if TYPE_CHECKING:
    from inlay.client.async_llm import AsyncLLM
    from inlay.policy import ReusePolicy
    from inlay.prompt.request import PromptPart


@dataclass(frozen=True, slots=True)
class Source:
    """A document in a prompt.

    Args:
        start: the position of its first token.
        tokens: the number of its tokens.
        cached: how many of them are stored as a module.
        place: the tier that has them, or the reason why they are missing.
    """

    document: str
    start: int
    tokens: int
    cached: int
    place: str

    def read(self, usage: Usage, *, modular: bool) -> Source:
        """Return what the request read, by its usage. Without modules, and after promotion, it read a prefix."""
        prefix = usage.exact_tokens if not modular or usage.promoted_tokens else 0
        exact = max(0, min(self.tokens, prefix - self.start))
        if modular and exact <= self.cached:
            return self
        return Source(self.document, self.start, self.tokens, exact, "exact prefix" if exact else "no such prefix")


async def sources_of(
    llm: AsyncLLM, prompt: list[dict[str, Any]], policy: ReusePolicy, names: Sequence[str], adapter: str | None
) -> list[Source]:
    """Look up the documents of a prompt before it runs. Empty if the chat template rewrites their messages.

    Args:
        policy: a settled policy.
        names: of the documents, in the order of the prompt.
    """
    from inlay.prompt.placed import ContentPart

    layout = llm.processor.lay_out(prompt, policy)
    placed = [part for part in layout.parts if isinstance(part.origin, ContentPart) and part.origin.marked]
    if len(placed) != len(names):
        return []
    made_with = llm.client.model.adapter(adapter)
    by_start = {part.start: part for part in llm.processor.parts(layout, policy, adapter=made_with)}
    found = []
    for name, part in zip(names, placed, strict=True):
        cached, place = await _look(llm, by_start.get(part.start), adapter)
        found.append(Source(name, part.start, len(part.ids), cached, place))
    return found


async def _look(llm: AsyncLLM, part: PromptPart | None, adapter: str | None) -> tuple[int, str]:
    """Return the stored tokens of a part, and the tier or the reason."""
    if part is None or not part.candidates:
        return 0, "no module"
    scope = Scope(adapter=adapter)
    wanted = llm.processor.encoding("documents", part.candidates, scope)
    states = await asyncio.wrap_future(llm.admin.look(wanted, scope.pin_owner))
    best = max((state for state in states if state is not None and state.tiers), key=lambda s: s.tokens, default=None)
    if best is not None:
        return min(best.tokens, len(part.ids)), best.tiers[0]
    residency = llm.local.residency
    return 0, await asyncio.wrap_future(llm.local.call(lambda: residency.why_missing(part.candidates[-1])))


def rows_of(sources: Sequence[Source], usage: Usage) -> list[tuple[str, int, int, str]]:
    """Return name, tokens, cached tokens and place of each document, then of all other text."""
    rows = [(each.document, each.tokens, each.cached, each.place) for each in sources]
    tokens = usage.prompt_tokens - sum(each.tokens for each in sources)
    cached = usage.cached_tokens - sum(each.cached for each in sources)
    return [*rows, ("other text", tokens, max(0, min(tokens, cached)), "")]


_FORMS = ("exact", "promoted", "scaffold", "anchored", "primed", "isolated", "shifted", "recomputed", "across")


def usage_in_words(usage: Usage) -> str:
    """Return the counts of a request in one line."""
    cached = f"{usage.cached_tokens:,} of {counted(usage.prompt_tokens, 'prompt token')} cached"
    forms = [f"{getattr(usage, f'{form}_tokens'):,} {form}" for form in _FORMS if getattr(usage, f"{form}_tokens")]
    tiers = [f"{getattr(usage, f'{tier}_tokens'):,} from {tier}" for tier in ("host", "disk", "shared")]
    tiers = [each for each in tiers if not each.startswith("0 ")]
    missed = [f"{tokens:,} {reason}" for reason, tokens in usage.misses]
    lines = [cached + (f" ({', '.join([*forms, *tiers])})" if forms or tiers else "")]
    return "; ".join([*lines, *([f"missing: {', '.join(missed)}"] if missed else [])])
