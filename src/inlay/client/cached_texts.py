"""Counts the stored tokens of texts, for retrievers that choose between texts of equal relevance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from inlay.client.options import OwnerOptions, scope_of
from inlay.client.schema_calls import SchemaCalls
from inlay.errors import ParameterError
from inlay.kv.identity import SegmentSpec
from inlay.policy import ReusePolicy
from inlay.prompt.request import PromptPart
from inlay.prompt.seen_texts import is_hash
from inlay.types import CachedText, Scope

#: The most texts of one call, and their characters together.
MOST_TEXTS, MOST_CHARACTERS = 1_000, 4_000_000
#: The most characters of the messages in front of them, counted once for each text.
MOST_IN_FRONT = 16_000_000


class CachedTextCalls(SchemaCalls):
    """The call behind ``LLM.score_cached``."""

    async def _score_cached(
        self,
        texts: Sequence[str],
        hashes: Sequence[str],
        messages: Sequence[Any],
        *,
        alone: bool,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        **owner: Unpack[OwnerOptions],
    ) -> list[CachedText]:
        scope = scope_of(**owner)
        policy = self.policy(reuse, positions, adapter=scope.adapter)
        check_hashes(texts, hashes)
        if hashes:
            known = self.processor.seen_texts.find(scope.cache_salt, hashes)
            found = [text for text in known if text is not None]
            scores = iter(await self._scores(found, messages, policy, scope, alone=alone) if found else ())
            return [CachedText.unknown() if text is None else next(scores) for text in known]
        return await self._scores(texts, messages, policy, scope, alone=alone)

    async def _scores(
        self, texts: Sequence[str], messages: Sequence[Any], policy: ReusePolicy, scope: Scope, *, alone: bool
    ) -> list[CachedText]:
        check_texts(texts, messages)
        if not policy.modular:
            raise ParameterError(
                f"reuse is '{policy}', which reads no texts of their own; score texts under modular or primed",
                code="policy.reads_no_modules",
            )
        find = lambda: self.processor.marked_parts(texts, messages, policy, scope, alone=alone)  # noqa: E731
        parts = await self._waiting.work(self.pools.prompts, find, scope.cache_salt or None)
        specs = list({spec.key: spec for part in parts if part is not None for spec in part.candidates}.values())
        stored = await self._resident(specs, scope)
        token_s = self.stats().token_s
        return [_scored(part, stored, token_s) for part in parts]

    async def _resident(self, specs: Sequence[SegmentSpec], scope: Scope) -> dict[bytes, dict[str, int]]:
        """Return the stored tokens of segments by tier, by key."""
        encoding = self.processor.encoding("the texts", specs, scope)
        found = await self._waiting.result(self.client.resident(encoding))
        return {spec.key: tiers for spec, tiers in zip(specs, found, strict=True)}


def check_hashes(texts: Sequence[str], hashes: Sequence[str]) -> None:
    """Raise ParameterError for texts beside hashes, for too many hashes, or for a wrong one."""
    if texts and hashes:
        raise ParameterError("texts and hashes are both given; give one of them", code="parameter.conflict")
    if len(hashes) > MOST_TEXTS:
        raise ParameterError(
            f"hashes has {len(hashes):,} hashes, and {MOST_TEXTS:,} are scored at once; send them in parts",
            code="texts.too_many",
        )
    if isinstance(hashes, str) or (wrong := next((one for one in hashes if not is_hash(one)), None)) is not None:
        shown = hashes if isinstance(hashes, str) else wrong
        raise ParameterError(
            f"hashes has {shown!r:.80}; give a list of sha256 of the texts' UTF-8 bytes, 64 digits 0-9a-f each",
            code="texts.wrong_hash",
        )


def check_texts(texts: Sequence[str], messages: Sequence[Any]) -> None:
    """Raise ParameterError for too many or too long texts, alone or with the messages in front of each."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ParameterError("texts must be a list of texts", code="texts.wrong")
    if len(texts) > MOST_TEXTS:
        raise ParameterError(
            f"texts has {len(texts):,} texts, and {MOST_TEXTS:,} are scored at once; send them in parts",
            code="texts.too_many",
        )
    characters = sum(map(len, texts))
    if characters > MOST_CHARACTERS:
        raise ParameterError(
            f"texts has {characters:,} characters, and {MOST_CHARACTERS:,} are scored at once; send them in parts",
            code="texts.too_long",
        )
    in_front = sum(len(str(message)) for message in messages)
    if len(texts) > 1 and in_front * len(texts) > MOST_IN_FRONT:
        raise ParameterError(
            f"messages has {in_front:,} characters, which are read for each of {len(texts):,} texts; "
            f"send at most {max(1, MOST_IN_FRONT // in_front):,} texts at once",
            code="texts.too_many",
        )


def _scored(part: PromptPart | None, stored: dict[bytes, dict[str, int]], token_s: float | None) -> CachedText:
    if part is None:
        return CachedText(0, "", {}, 0.0, 0.0)
    whole = (spec for spec in part.candidates if sum(stored.get(spec.key, {}).values()) == len(spec.ids))
    best = next(whole, part.candidates[-1])  # the engine reads the first stored one, and encodes the last one
    resident = stored.get(best.key, {})
    held, tokens = sum(resident.values()), len(part.ids)
    cost = 0.0 if token_s is None else token_s
    return CachedText(
        tokens,
        part.form_of(best),
        resident,
        None if token_s is None else (tokens - held) * cost,
        None if token_s is None else held * cost,
    )
