"""Counts the stored tokens of texts, and warms by plan: encodes the texts that save most seconds per byte of KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from inlay.client.base import Progress
from inlay.client.options import OwnerOptions, scope_of
from inlay.client.schema_calls import SchemaCalls
from inlay.errors import ParameterError
from inlay.kv.identity import SegmentSpec
from inlay.policy import ReusePolicy
from inlay.prompt.inputs import parse_ttl
from inlay.prompt.request import PromptPart
from inlay.prompt.seen_pieces import is_hash
from inlay.settings import parse_bytes
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


#: The most entries of a plan, and the characters of their texts together.
MOST_ENTRIES, MOST_PLAN_CHARACTERS = 10_000, 64_000_000


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A module of a schema, or a document, with its expected use.

    Args:
        expected: the number of later prompts that will read it, above 0.
        text: of the document, as a marked part of a message will have it.
        messages: the messages in front of the document, usually the system message.
        schema: the name of a schema, in place of a text.
        module: the path of one of its modules.
    """

    expected: float = 1.0
    text: str | None = None
    messages: Sequence[Any] = ()
    schema: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True)
class PlannedText:
    """The outcome for one entry of a plan.

    Attributes:
        entry: the entry.
        tokens: its missing tokens before the plan ran, without those of entries chosen before it.
        bytes: the KV bytes of these tokens.
        state: "stored", "encoded" or "left out".
        saved_s_per_byte: seconds that later prompts save for each byte. None if the engine has not run a prompt.
    """

    entry: PlanEntry
    tokens: int
    bytes: int
    state: str
    saved_s_per_byte: float | None


def choose(entries: Sequence[tuple[float, Mapping[bytes, int]]], budget: int) -> list[tuple[int, int]]:
    """Choose entries by seconds per byte, greedily: the best one that fits, then the next best.

    Tokens take equal time and equal bytes, so seconds per byte are in proportion to the expected use. Among equals the
    earlier entry goes first. A segment of several entries is counted once.

    Args:
        entries: for each, the expected use, and the size of each missing segment by key.
        budget: the most size of the chosen segments together.

    Returns:
        The index and the size of each chosen entry, the best first.
    """
    taken: set[bytes] = set()
    chosen, left = [], budget
    for index in sorted(range(len(entries)), key=lambda index: -entries[index][0]):
        missing = {key: size for key, size in entries[index][1].items() if key not in taken}
        size = sum(missing.values())
        if size <= left:
            taken.update(missing)
            left -= size
            chosen.append((index, size))
    return chosen


class PlanCalls(CachedTextCalls):
    """The calls behind ``LLM.score_cached`` and ``LLM.warm_plan``."""

    async def _warm_plan(
        self,
        plan: Sequence[PlanEntry],
        budget: int | str,
        ttl: str | None,
        progress: Progress | None,
        *,
        reuse: str | ReusePolicy | None = None,
        positions: str | None = None,
        **owner: Unpack[OwnerOptions],
    ) -> list[PlannedText]:
        scope = scope_of(**owner)
        policy = self.policy(reuse, positions, adapter=scope.adapter)
        if not policy.modular:
            raise ParameterError(
                f"reuse is '{policy}', which reads no modules; warm a plan under modular or primed",
                code="policy.reads_no_modules",
            )

        def policy_of(entry: PlanEntry) -> ReusePolicy:
            return policy if entry.text is not None else self._schema_policy(entry.schema, reuse, positions, scope)

        most, ttl_s = parse_bytes("budget", budget), None if ttl is None else parse_ttl(ttl)
        check_plan(plan)
        segments = [await self._segments(entry, policy_of(entry), scope) for entry in plan]
        specs = list({spec.key: spec for several in segments for spec in several}.values())
        stored = await self._resident(specs, scope) if specs else {}
        per_token = self.client.model.bytes_per_token
        missing = [
            {
                spec.key: len(spec.ids) * per_token
                for spec in several
                if sum(stored.get(spec.key, {}).values()) < len(spec.ids)
            }
            for several in segments
        ]
        chosen = choose([(entry.expected, sizes) for entry, sizes in zip(plan, missing, strict=True)], most)
        total, done = sum(each for _, each in chosen) // per_token, 0
        for index, each in chosen:  # one by one, because the pool may be smaller than the budget
            wanted = [spec for spec in segments[index] if each and spec.key in missing[index]]
            if wanted:
                await self._encode(self.processor.encoding(f"entry {index + 1}", wanted, scope, ttl_s=ttl_s), None)
                done += each // per_token
                if progress is not None:
                    progress(done, total)
        sizes = dict(chosen)
        token_s = self.stats().token_s
        rows = []
        for index, entry in enumerate(plan):
            size = sizes.get(index, sum(missing[index].values()))
            state = "left out" if index not in sizes else "encoded" if size else "stored"
            rate = None if token_s is None else entry.expected * token_s / per_token
            rows.append(PlannedText(entry, size // per_token, size, state, rate))
        return rows

    async def _segments(self, entry: PlanEntry, policy: ReusePolicy, scope: Scope) -> list[SegmentSpec]:
        """Return the segments of an entry, each behind those that it attends to."""
        if entry.text is None:
            modules = await self._laid_out(
                lambda: self.processor.schemas.module_specs(entry.schema, policy, scope), scope
            )
            if entry.module not in modules:
                raise ParameterError(
                    f"schema '{entry.schema}' stores no module '{entry.module}'; name one of its modules",
                    code="plan.unknown_module",
                )
            ends = modules[entry.module]
        else:
            text, messages = entry.text, entry.messages
            find = lambda: self.processor.marked_parts([text], messages, policy, scope)  # noqa: E731
            (part,) = await self._waiting.work(self.pools.prompts, find, scope.cache_salt or None)
            ends = [] if part is None else [part.candidates[-1]]
        found: dict[bytes, SegmentSpec] = {}
        for spec in ends:
            chain: list[SegmentSpec] = []
            behind: SegmentSpec | None = spec
            while behind is not None:
                chain.append(behind)
                behind = behind.parent
            found.update((one.key, one) for one in reversed(chain))
        return list(found.values())


def check_plan(plan: Sequence[PlanEntry]) -> None:
    """Raise ParameterError for a plan that is too long, or an expected use that is no number above 0."""
    if len(plan) > MOST_ENTRIES:
        raise ParameterError(
            f"the plan has {len(plan):,} entries, and {MOST_ENTRIES:,} are allowed; give it in parts",
            code="plan.too_long",
        )
    characters = sum(len(entry.text or "") for entry in plan)
    if characters > MOST_PLAN_CHARACTERS:
        raise ParameterError(
            f"the plan has {characters:,} characters, and {MOST_PLAN_CHARACTERS:,} are allowed; give it in parts",
            code="plan.too_long",
        )
    for number, entry in enumerate(plan, 1):
        if not 0 < entry.expected < float("inf"):
            raise ParameterError(
                f"entry {number} of the plan: expected is {entry.expected!r}; give a number above 0",
                code="plan.wrong_entry",
            )
