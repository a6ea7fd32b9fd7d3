"""What comes out of a request, and what an engine tells of itself, under the names that vLLM users know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from inlay.logprobs import Logprob
from inlay.wording import counted, html_table, show


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a request, finished or so far.

    ``logprobs`` has one entry per token of ``token_ids``: the chosen token's and those of the alternatives asked for.
    ``stop_reason`` is the stop string or the stop token that ended the answer, None for end-of-sequence or length.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None


#: Why keys and values of a module were nowhere; see docs/store.md.
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
    """How many of a request's prompt tokens were computed for it, and what the others were reused from.

    Arguments:
        prompt_tokens: tokens of the prompt; always cached_tokens + computed_tokens.
        cached_tokens: those whose KV came from the store; always exact_tokens + module_tokens.
        computed_tokens: those computed for this request.
        exact_tokens: cached tokens whose context digest equals that of what stands before them here, at shift zero
            relative to all of it: their KV is what a full prefill would give.
        module_tokens: cached tokens that were encoded in another context, or have passed through a lossy codec: an
            approximation; always scaffold_tokens + anchored_tokens + isolated_tokens.
        scaffold_tokens, anchored_tokens, isolated_tokens: those of modules that were encoded with the others of their
            scaffold, behind the text that is always there, and alone.
        reanchored_tokens: those of anchored_tokens that were encoded behind an earlier version of this prompt's system
            turn, because it has changed.
        promoted_tokens: exact tokens that are read in place of modules: ``modular`` found the beginning of this prompt
            encoded as it stands, in idle time or for an earlier request.
        shifted_tokens: cached tokens read at another offset, relative to their context, than they were encoded at.
        recomputed_tokens: computed tokens whose KV was stored: the last one of a prompt all of which was, as somebody
            has to compute what follows it.
        repaired_tokens: tokens of modules that are read as they are behind what really stands before them here, since
            the policy asks for that repair: computed so for this request, or found computed so.
        linked_tokens: repaired tokens that were chosen as the first ones of their module; under a ``profiled`` repair
            those of modules that had no profile yet.
        selecting_tokens: passes of one token through all layers that were made to choose the repaired tokens: under
            ``query`` those of new text that is computed once more behind what was chosen, under ``blend`` all modules'
            through a part of the layers. Not among computed_tokens.
        host_tokens: cached tokens that were not in the pool of a device when the request came, and were read from the
            memory of the host for it.
        disk_tokens: cached tokens that were not in the pool when the request came, and were read from the store on
            disk for it.
        shared_tokens: the same of the store that is shared with other servers.
        written_tokens: computed tokens whose KV is kept for requests to come, as long as there is room.
        across_tokens: module tokens that were made without the request's adapter, which its policy allows.
        misses: tokens of modules among those computed, by why their KV was nowhere (MISS_REASONS).
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    exact_tokens: int
    module_tokens: int
    shifted_tokens: int
    recomputed_tokens: int = 0
    repaired_tokens: int = 0
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

    def __post_init__(self) -> None:
        assert min(self.cached_tokens, self.computed_tokens, self.exact_tokens, self.module_tokens) >= 0, self
        assert self.prompt_tokens == self.cached_tokens + self.computed_tokens, self
        assert self.cached_tokens == self.exact_tokens + self.module_tokens, self
        assert 0 <= self.shifted_tokens <= self.cached_tokens, self
        assert 0 <= self.recomputed_tokens <= self.computed_tokens, self
        assert 0 <= self.linked_tokens <= self.repaired_tokens <= self.prompt_tokens, self
        assert min(self.selecting_tokens, self.host_tokens, self.disk_tokens, self.shared_tokens) >= 0, self
        assert self.host_tokens + self.disk_tokens + self.shared_tokens <= self.cached_tokens, self
        assert 0 <= self.written_tokens <= self.computed_tokens, self
        assert 0 <= self.across_tokens <= self.module_tokens, self
        assert 0 <= self.promoted_tokens <= self.exact_tokens, self
        assert 0 <= self.reanchored_tokens <= self.anchored_tokens, self
        assert self.scaffold_tokens + self.anchored_tokens + self.isolated_tokens <= self.module_tokens, self


@dataclass(frozen=True, slots=True)
class SetOrder:
    """The order in which the members of a set stand in a prompt: imports of a ``<set>``, or parts of a message.

    members: names of modules, by their paths, or of parts, like ``messages[0].content[1]``.
    why_fixed: the reason why no other order was possible; None where the engine has chosen.
    """

    members: tuple[str, ...]
    why_fixed: str | None = None

    @property
    def told(self) -> dict[str, list[str] | str]:
        """The same as JSON has it; ``why_fixed`` is left out where the engine has chosen."""
        return {"members": list(self.members)} | ({} if self.why_fixed is None else {"why_fixed": self.why_fixed})


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a request's time went, in seconds from its arrival; None is not yet known.

    ``ttft_s`` ends at the first token, ``total_s`` at the last; ``encode_s`` was spent on segments that it missed.
    The time to the first token has three parts: ``queue_s`` in line for a place, ``fetch_s`` for finding what is stored
    and making room for the rest, and ``compute_s`` from there on.
    """

    ttft_s: float | None = None
    encode_s: float = 0.0
    total_s: float | None = None
    queue_s: float | None = None
    fetch_s: float = 0.0
    compute_s: float | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """How full a tier is, and what it did since the process began.

    Arguments:
        segments, tokens, bytes, quota: what it holds, and the most bytes that it may hold; 0 for no bound.
        hits, hit_tokens: segments that were read. misses: reads that gave nothing, by reason.
        writes, written_bytes, refused: segments that were written; those that there was no room or no leave for.
        evictions: segments that went to make room. evicted_age_s: for how long they had not been read, summed.
        up: whether it can be asked. failures: how often it has turned out that it cannot.
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
    """Where a stored segment lies, and what is said of it.

    Arguments:
        key: of the segment, or of the form of it that is there; codec: what that has passed through.
        tokens: of it. tiers: where it lies, nearest first: "pool", "host", "disk", "shared"; none where it is pinned
            alone.
        uses: how often it was computed or read, as far as the pool knows; 0 where it is not there.
        pinned: whether whoever asks has pinned it. ttl_s: for how long it is to be found; None for no end.
    """

    key: bytes
    codec: str
    tokens: int
    tiers: tuple[str, ...]
    uses: int = 0
    pinned: bool = False
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class DriftStats:
    """How far answers of one schema, under one policy and for one salt, are from full prefill: see docs/reuse.md.

    Arguments:
        schema: its name; "" for messages in parts. reuse, positions: the policy that they were given under.
        samples: answers that were compared since the start.
        kl: nats a token, the mean over the latest of them. low, high: its 95% bounds; None for no bound.
        top1: the share of their steps at which the likeliest token is the same.
        taken: the policy that requests get instead, since that is too far; None where they get what they ask for.
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
class DriftTotals:
    """The same of all salts together, since the start.

    Arguments:
        schema, reuse: as in DriftStats. samples: answers. kl: nats a token, summed over them.
        at_most: how many of them are within each of DRIFT_BOUNDS.
        steps: of these answers, and agreeing: those at which the likeliest token is the same.
        fallbacks: of how many salts requests get a safer policy now.
    """

    schema: str
    reuse: str
    samples: int
    kl: float
    at_most: tuple[int, ...]
    steps: int
    agreeing: int
    fallbacks: int


#: Nats a token, by which answers are counted.
DRIFT_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

#: Why an answer that was chosen for comparison was not compared; see docs/reuse.md.
DROP_REASONS = ("busy", "gone", "no room", "failed")


@dataclass(frozen=True, slots=True)
class ShadowStats:
    """What shadow sampling did since the start: answers that were run again in full, in idle time.

    Arguments:
        waiting: answers that are still to be compared. samples: those that were.
        tokens, seconds: what that took. dropped: those that were not compared, by reason (DROP_REASONS).
        totals: by schema and policy.
    """

    waiting: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    dropped: tuple[tuple[str, int], ...] = ()
    totals: tuple[DriftTotals, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is doing, and how full its pool is.

    Arguments:
        running, waiting: requests; each of a prompt's ``n`` answers counts.
        chunks: of the pool. used_chunks: those in which anything lies. held_chunks: those that running requests need;
            what lies in the others is evicted when room is needed.
        segments, stored_tokens: what the store finds.
        steps, preemptions: since the start.
        busy: whether there is anything to do, encodings too.
        profiled_tokens, profile_s: computed in idle time to learn how much tokens of modules move, and its seconds.
        promoted_tokens, promotion_s: computed in idle time of combinations that are asked for again, and its seconds.
        pinned_bytes: of the pool, that pins take.
        encoded_tokens: tokens of modules, and of schemas' always-present text, that were computed since the start.
        host_tokens, disk_tokens, shared_tokens: tokens that came into the pool from the memory of the host, from the
            store on disk, and from the shared one. unwritten_segments: those that wait to be written, write_lag_s: for
            how long the first of them has. host, disk, shared: how full they are, and what they did; None where there
            is none.
        shadow: see ShadowStats; None where no answers are compared.
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


@dataclass(frozen=True, slots=True, repr=False)
class RequestOutput:
    """A request with its answers, finished or so far.

    ``prompt_positions`` holds the position ID of every token of ``prompt_token_ids``; with reused modules they may
    have gaps. ``prompt`` is None where the request was given as token ids. ``prompt_logprobs``, where they were asked
    for, has one entry per token of the prompt: None for the first, and for those that are not computed yet.
    ``reuse`` is the policy that it got, as it is written: where it asked for ``auto``, what that was. Where shadow
    sampling has found that the policy it would have had goes too far from full prefill, ``fell_back_from`` is that one;
    else None. ``order`` has an entry for each set of the prompt; until the
    request has a place, its members stand as they are written.
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
        """Prompt tokens whose KV came from the store."""
        return self.usage.cached_tokens
