"""Outputs of requests and statistics of an engine, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from inlay.diagnostics import Diagnostics
from inlay.logprobs import Logprob
from inlay.wording import counted, html_table, show


@dataclass(frozen=True, slots=True)
class Scope:
    """The owner of a request, and the adapter that answers it.

    Args:
        cache_salt: shares the request's cached text only with requests of the same salt. "" shares it with all.
        tenant: tenants share passes, slots and the queue (docs/guides/many-requests.md).
        adapter: the name of the adapter. None for the model alone.
        weight: the size of the tenant's share relative to others.
    """

    cache_salt: str = ""
    tenant: str = ""
    adapter: str | None = None
    weight: float = 1.0

    @property
    def pin_owner(self) -> str:
        """The owner of pins: the tenant under any salt, else the salt."""
        return self.tenant or self.cache_salt


#: The scope of a request without any: shared with all, answered by the model alone.
EVERYONE = Scope()


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a request, finished or so far.

    ``logprobs`` has one entry per token of ``token_ids``, with the chosen token and the requested alternatives.
    ``stop_reason`` is the stop string or stop token that ended the answer; None for end-of-sequence or length.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None


#: The texts in which drafts are found: modules of the prompt, the request's other text with its answer, and earlier
#: answers under its salt.
DRAFT_SOURCES = ("module", "text", "answer")

#: Reasons why a module's KV was not stored; see docs/guides/cache-tiers.md.
MISS_REASONS = (
    "never seen",
    "evicted",
    "late",
    "corrupt",
    "failed",
    "other model",
    "other version",
    "other codec",
    "other salt",
    "other context",
    "expired",
)


@dataclass(frozen=True, slots=True)
class Usage:
    """The prompt tokens of a request, by computation and reuse.

    Args:
        prompt_tokens: tokens of the prompt. Always cached_tokens + computed_tokens.
        cached_tokens: tokens with KV from the store. Always exact_tokens + module_tokens.
        computed_tokens: tokens computed for this request.
        exact_tokens: cached tokens with an equal context digest, at shift zero relative to all of their context. Their
            KV is that of a full prefill.
        module_tokens: cached tokens that were encoded in another context or passed through a lossy codec. They are
            approximate.
        scaffold_tokens: module tokens encoded with the other modules of their scaffold.
        anchored_tokens: module tokens encoded behind the always-present text.
        isolated_tokens: module tokens encoded alone.
        reanchored_tokens: anchored tokens encoded behind an earlier version of this prompt's system turn.
        primed_tokens: anchored tokens encoded behind a sample text as well.
        moved_tokens: module tokens that are text of an earlier request, computed behind other text.
        found_tokens: unmarked tokens that were found by their content in an earlier prompt. They are read as modules,
            recomputed, or computed if they are not stored.
        promoted_tokens: exact tokens read in place of modules. ``modular`` found this prompt's prefix encoded exactly,
            in idle time or for an earlier request.
        shifted_tokens: cached tokens read at another offset, relative to their context, than at encoding.
        duplicate_tokens: computed tokens whose KV was stored: the last token of a fully stored prompt, because its
            logits are needed.
        recomputed_tokens: module tokens that ``recompute`` of the policy recomputed behind the text before them. They
            were computed for this request, or found stored.
        linked_tokens: recomputed tokens chosen as the first ones of their module. Under ``profiled`` these are in
            modules without a profile.
        selecting_tokens: the cost of choosing the recomputed tokens, in passes of one token through all layers. It is
            not part of computed_tokens. Under ``query`` it counts new text that is computed again behind the chosen
            tokens. Under ``blend`` it counts all modules' tokens, weighted by the share of layers that they pass.
        host_tokens: cached tokens loaded from host memory for the request.
        disk_tokens: cached tokens loaded from the store on disk for the request.
        shared_tokens: cached tokens loaded from the store that servers share.
        written_tokens: computed tokens whose KV is stored for later requests while there is room.
        lasting_tokens: written tokens of parts with a lifetime of at least an hour.
        across_tokens: module tokens encoded without the request's adapter, if its policy allows that.
        misses: computed module tokens by the reason for the miss (MISS_REASONS).
        drafted_tokens: draft tokens that were computed for the answers, in addition to one token a pass.
        accepted_tokens: draft tokens that the answers accepted. Each of them saved a pass.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    exact_tokens: int
    module_tokens: int
    shifted_tokens: int
    duplicate_tokens: int = 0
    recomputed_tokens: int = 0
    linked_tokens: int = 0
    selecting_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    shared_tokens: int = 0
    across_tokens: int = 0
    written_tokens: int = 0
    misses: tuple[tuple[str, int], ...] = ()
    scaffold_tokens: int = 0
    anchored_tokens: int = 0
    isolated_tokens: int = 0
    promoted_tokens: int = 0
    reanchored_tokens: int = 0
    primed_tokens: int = 0
    lasting_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    moved_tokens: int = 0
    found_tokens: int = 0

    def __post_init__(self) -> None:
        assert min(self.cached_tokens, self.computed_tokens, self.exact_tokens, self.module_tokens) >= 0, self
        assert self.prompt_tokens == self.cached_tokens + self.computed_tokens, self
        assert self.cached_tokens == self.exact_tokens + self.module_tokens, self
        assert 0 <= self.shifted_tokens <= self.cached_tokens, self
        assert 0 <= self.duplicate_tokens <= self.computed_tokens, self
        assert 0 <= self.linked_tokens <= self.recomputed_tokens <= self.prompt_tokens, self
        assert min(self.selecting_tokens, self.host_tokens, self.disk_tokens, self.shared_tokens) >= 0, self
        assert self.host_tokens + self.disk_tokens + self.shared_tokens <= self.cached_tokens, self
        assert 0 <= self.lasting_tokens <= self.written_tokens <= self.computed_tokens, self
        assert 0 <= self.accepted_tokens <= self.drafted_tokens, self
        assert 0 <= self.across_tokens <= self.module_tokens, self
        assert 0 <= self.found_tokens <= self.prompt_tokens, self
        assert 0 <= self.promoted_tokens <= self.exact_tokens, self
        assert 0 <= self.reanchored_tokens + self.primed_tokens <= self.anchored_tokens, self
        encoded = self.scaffold_tokens + self.anchored_tokens + self.isolated_tokens
        assert encoded + self.moved_tokens <= self.module_tokens, self


@dataclass(frozen=True, slots=True)
class SetOrder:
    """The order of a set's members in a prompt: imports of a ``<set>``, or parts of a message.

    Args:
        members: paths of modules, or names of parts like ``messages[0].content[1]``.
        why_fixed: the reason for a fixed order. None if the engine has chosen.
    """

    members: tuple[str, ...]
    why_fixed: str | None = None

    @property
    def told(self) -> dict[str, list[str] | str]:
        """The JSON form. ``why_fixed`` is left out if the engine has chosen."""
        return {"members": list(self.members)} | ({} if self.why_fixed is None else {"why_fixed": self.why_fixed})


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds from its arrival; None for unknown ones.

    ``ttft_s`` ends at the first token, ``total_s`` at the last. ``encode_s`` is the time for missing segments.
    The time to the first token has three parts. ``queue_s`` is spent in the queue. ``fetch_s`` is spent
    on finding stored KV and making room for the rest. ``compute_s`` is the remainder.
    """

    ttft_s: float | None = None
    encode_s: float = 0.0
    total_s: float | None = None
    queue_s: float | None = None
    fetch_s: float = 0.0
    compute_s: float | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """The contents of a tier, and its counters since the start of the process.

    Args:
        segments, tokens, bytes: stored now.
        quota: the most bytes; 0 for no bound.
        hits, hit_tokens: segments that were read, and their tokens.
        misses: failed reads by reason.
        writes, written_bytes: segments that were written.
        refused: segments that were rejected for lack of room or permission.
        evictions: segments evicted to make room.
        evicted_age_s: the time since their last read, summed.
        up: True if the tier is reachable.
        failures: how often it became unreachable.
    """

    segments: int = 0
    tokens: int = 0
    bytes: int = 0
    quota: int = 0
    hits: int = 0
    hit_tokens: int = 0
    misses: tuple[tuple[str, int], ...] = ()
    writes: int = 0
    written_bytes: int = 0
    refused: int = 0
    evictions: int = 0
    evicted_age_s: float = 0.0
    up: bool = True
    failures: int = 0


@dataclass(frozen=True, slots=True)
class SegmentState:
    """The tiers of a stored segment, and its attributes.

    Args:
        key: of the segment, or of its stored form.
        codec: the codec of the stored form.
        tokens: the number of tokens.
        tiers: "pool", "host", "disk", "shared", nearest first. Empty if the segment is only pinned.
        uses: computations and reads that the pool knows; 0 outside the pool.
        pinned: True if the caller has pinned it.
        ttl_s: its lifetime in seconds. None for no end.
        idle_s: seconds since the last read in the pool. None outside the pool.
    """

    key: bytes
    codec: str
    tokens: int
    tiers: tuple[str, ...]
    uses: int = 0
    pinned: bool = False
    ttl_s: float | None = None
    idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class CachedText:
    """The stored tokens of a text as a marked part of a message.

    Args:
        tokens: of the text.
        form: how its stored segment was encoded, or how it would be encoded: "primed", "anchored" or "isolated".
            "unknown" for a hash without a known text.
        resident: the tokens that are stored, by their nearest tier: "pool", "host", "disk", "shared". A cluster reports
            "pool" and "below", the tiers of any replica.
        compute_s: seconds to compute the tokens that are not stored. None before the engine has measured a pass.
        saved_s: seconds that computing the stored tokens would take. Loading them from a lower tier is not counted.
    """

    tokens: int
    form: str
    resident: Mapping[str, int]
    compute_s: float | None
    saved_s: float | None

    @classmethod
    def unknown(cls) -> CachedText:
        """Return the score of a hash whose text the engine does not know."""
        return cls(0, "unknown", {}, None, 0.0)

    @property
    def resident_tokens(self) -> int:
        """The tokens that are stored in any tier."""
        return sum(self.resident.values())


@dataclass(frozen=True, slots=True)
class DivergenceStats:
    """The divergence of one schema's answers under one policy and salt; see docs/guides/reuse-policies.md.

    Args:
        schema: its name. "" for messages in parts.
        reuse, positions: the policy of the answers.
        samples: answers compared since the start.
        kl: the mean over the latest of them, in nats a token.
        low, high: its 95% bounds. None for no bound.
        top1: the share of steps with the same most probable token.
        taken: the fallback policy, if the divergence is too large; else None.
    """

    schema: str
    reuse: str
    positions: str
    samples: int
    kl: float
    low: float
    high: float | None
    top1: float
    taken: str | None = None


@dataclass(frozen=True, slots=True)
class DivergenceTotals:
    """Divergence counters over all salts since the start.

    Args:
        schema, reuse: as in DivergenceStats.
        samples: answers compared.
        kl: nats a token, summed over the answers.
        at_most: the number of answers within each of DIVERGENCE_BOUNDS.
        steps: of these answers.
        agreeing: steps with the same most probable token.
        fallbacks: the number of salts with a fallback policy now.
    """

    schema: str
    reuse: str
    samples: int
    kl: float
    at_most: tuple[int, ...]
    steps: int
    agreeing: int
    fallbacks: int


#: Histogram bounds of divergence, in nats a token.
DIVERGENCE_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

#: Reasons why a sampled answer was not compared; see docs/guides/reuse-policies.md.
DROP_REASONS = ("busy", "gone", "no room", "failed")


@dataclass(frozen=True, slots=True)
class ShadowStats:
    """Shadow sampling since the start: answers recomputed in full in idle time.

    Args:
        waiting: answers that wait for comparison.
        samples: answers compared.
        tokens, seconds: the cost of that.
        dropped: answers not compared, by reason (DROP_REASONS).
        totals: by schema and policy.
    """

    waiting: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    dropped: tuple[tuple[str, int], ...] = ()
    totals: tuple[DivergenceTotals, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of an engine and its pool.

    Args:
        running, waiting: requests; each of a prompt's ``n`` answers counts.
        chunks: of the pool.
        used_chunks: chunks with any content.
        held_chunks: chunks that running requests need. The contents of the others can be evicted.
        segments, stored_tokens: in the store.
        states, state_slots: stored states of recurrent layers, and the slots for them and for running requests.
        token_s: the seconds that a prompt token takes, a moving mean over passes. None before the first pass.
        used_state_slots, state_bytes: slots that are not free, and the bytes of all slots.
        state_hits, state_hit_tokens: admissions that continued a stored state, and the tokens in front of it.
        state_evictions: stored states that were removed to make room.
        steps, preemptions: since the start.
        busy: True if there is work, including encodings.
        profiled_tokens, profile_s: tokens and seconds of idle time spent on deviation profiles.
        promoted_tokens, promotion_s: tokens and seconds of idle time spent on promotion.
        pinned_bytes: of the pool.
        encoded_tokens: tokens of modules and of always-present text computed since the start.
        rows_saved: tokens that passes did not compute in a layer that reads another's KV, summed over those layers.
        host_tokens, disk_tokens, shared_tokens: tokens loaded into the pool from each tier.
        unwritten_segments: segments that wait to be written.
        write_lag_s: how long the first of them has waited.
        host, disk, shared: see TierStats. None without that tier.
        shadow: see ShadowStats. None without shadow sampling.
        drafted_tokens, accepted_tokens: draft tokens that were run, and that answers accepted, by source
            (DRAFT_SOURCES). Empty without speculation.
    """

    running: int
    waiting: int
    chunks: int
    used_chunks: int
    held_chunks: int
    segments: int
    stored_tokens: int
    steps: int
    preemptions: int
    busy: bool = False
    profiled_tokens: int = 0
    profile_s: float = 0.0
    promoted_tokens: int = 0
    promotion_s: float = 0.0
    encoded_tokens: int = 0
    rows_saved: int = 0
    pinned_bytes: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    shared_tokens: int = 0
    unwritten_segments: int = 0
    write_lag_s: float = 0.0
    host: TierStats | None = None
    disk: TierStats | None = None
    shared: TierStats | None = None
    shadow: ShadowStats | None = None
    states: int = 0
    state_slots: int = 0
    token_s: float | None = None
    used_state_slots: int = 0
    state_bytes: int = 0
    state_hits: int = 0
    state_hit_tokens: int = 0
    state_evictions: int = 0
    drafted_tokens: tuple[tuple[str, int], ...] = ()
    accepted_tokens: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class RequestOutput:
    """A request with its answers, finished or so far.

    Attributes:
        prompt: None for a request given as token ids.
        prompt_positions: the position ID of every token of ``prompt_token_ids``. Reused modules may leave gaps.
        prompt_logprobs: if requested, one entry per token of the prompt. None for the first one and for tokens that are
            not computed yet.
        embedding: if requested, the embedding of the prompt (``SamplingParams.pooling``), without normalization.
        reuse: the written form of the applied policy, with ``auto`` resolved.
        fell_back_from: the policy that shadow sampling replaced because of its divergence, else None.
        diagnostics: if requested, why tokens of the prompt were computed. None until all answers have ended.
        order: an entry for each set of the prompt. Members stand as written until the request is admitted.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_positions: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    usage: Usage
    metrics: RequestMetrics
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    order: tuple[SetOrder, ...] = ()
    reuse: str | None = None
    fell_back_from: str | None = None
    diagnostics: Diagnostics | None = None
    embedding: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.prompt_positions) == len(self.prompt_token_ids), "every prompt token has one position"

    def __repr__(self) -> str:
        texts = ", ".join(show(answer.text) for answer in self.outputs)
        state = "" if self.finished else ", unfinished"
        return f"<RequestOutput {self.request_id}: {texts}{state}; {self._counts()}>"

    def _repr_html_(self) -> str:
        rows = ((answer.index, answer.text, answer.finish_reason or "") for answer in self.outputs)
        return html_table(self._counts(), ("", "answer", "finish reason"), rows)

    def _counts(self) -> str:
        usage = self.usage
        return f"{counted(usage.prompt_tokens, 'prompt token')}, {usage.cached_tokens:,} of them cached"

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens with KV from the store."""
        return self.usage.cached_tokens
