"""EngineClient: what LLM, AsyncLLM, the server and batches need of an engine.

Requests go in as plain data (prompt/request.py), and events come out as plain data (events.py); nobody above a client
reaches behind it. The client of an engine in this process: in_process_client.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from inlay.engine.profiles import Profile
from inlay.events import EncodeEvent, TokenEvent
from inlay.kv.identity import SegmentSpec
from inlay.policy import ReusePolicy
from inlay.prompt.model_info import ModelInfo
from inlay.prompt.request import EncodeRequest, EngineRequest
from inlay.sampling_params import SamplingParams
from inlay.types import DriftStats, EngineStats, SegmentState


class Prepared(Protocol):
    """A request that is ready to be queued; only the client that made it looks into it."""

    @property
    def id(self) -> str: ...


TokenListener = Callable[[Sequence[TokenEvent]], None]
EncodeListener = Callable[[Sequence[EncodeEvent]], None]


class EngineClient(Protocol):
    """An engine as those who ask it for answers see it.

    Listeners are called with what is new, at most once a step, on a thread of the client's, and in the order in which
    it happened. They must be quick and must not raise.

    model: what it publishes of its model, for those who prepare requests.
    """

    @property
    def model(self) -> ModelInfo: ...

    def compile_grammar(self, params: SamplingParams, salt: str = "") -> Any:
        """What an answer has to follow, for ``prepare``; it may take long. None for none. Raises ParameterError."""
        ...

    def prepare(self, request: EngineRequest, grammar: Any = None) -> Prepared:
        """Do what takes long before a request can be queued, on the caller's thread.

        grammar: what ``compile_grammar`` gave; None compiles it here. Raises ParameterError.
        """
        ...

    def submit(self, request: Prepared, listener: TokenListener) -> None:
        """Queue a request. listener: hears of each step that has news of it, and of how it ends."""
        ...

    def finish(self, request_id: str, index: int) -> None:
        """End one of its answers, which its listener has found to be whole. Waits for nobody."""
        ...

    def encode(self, request: EncodeRequest, listener: EncodeListener) -> None:
        """Queue an encoding. listener: hears how far it is."""
        ...

    def cancel(self, request_id: str) -> None:
        """Give a request or an encoding up, wherever it stands; its listener hears no more of it. Waits for nobody."""
        ...

    def abort(self, request_id: str) -> None:
        """Give it up, and tell its listener so. Waits for nobody."""
        ...

    def stored(self, request: EncodeRequest) -> Future[frozenset[bytes]]:
        """The keys of those of its segments that are stored, as of the end of the step under way."""
        ...

    def look(self, request: EncodeRequest, owner: str) -> Future[list[SegmentState | None]]:
        """Of each of its segments, or forms of them, where it lies and what is said of it; None where it is nowhere.

        What an owner has pinned, see ``pin``, is shown wherever it is.
        """
        ...

    def modules(self) -> Future[tuple[SegmentSpec, ...]]:
        """The segments in the pool that were stored as modules, whoever's they are."""
        ...

    def evict(self, request: EncodeRequest) -> Future[int]:
        """Forget its segments, pinned ones too, and what was said behind them; returns how many tokens there were."""
        ...

    def pin(
        self, request: EncodeRequest, owner: str, reason: str, budget: int | None = None, *, instead: str | None = None
    ) -> Future[int]:
        """Keep its segments in the pool, those that come later too; returns what the owner's pins take, in bytes.

        reason: what ``unpin`` lets go. instead: a reason of the owner's that goes with this. A refusal changes nothing.
        budget: the most bytes that they may take; None for no bound but ``pin_memory``. Raises CapacityError.
        """
        ...

    def unpin(self, request: EncodeRequest, owner: str | None, reason: str) -> Future[int]:
        """Let its segments go as far as an owner, or None for anybody, keeps them for this reason.

        Returns what the owner's others take, in bytes.
        """
        ...

    def pinned(self, owner: str | None) -> Future[list[SegmentSpec]]:
        """What an owner has pinned; for None, what anybody has pinned by key."""
        ...

    def reset_prefix_cache(self) -> Future[None]:
        """Forget all that is stored and that no request reads."""
        ...

    def profile(self, specs: Sequence[SegmentSpec]) -> None:
        """Find out in idle time how much the tokens of these segments move, each behind others of them."""
        ...

    def profiles(self, specs: Iterable[SegmentSpec]) -> Future[dict[bytes, Profile]]:
        """What is known of that, by the keys of those segments of which something is."""
        ...

    def finish_profiles(self) -> None:
        """Do that now, where callers' threads step the engine, as far as it has nothing else to do."""
        ...

    def promote(self) -> None:
        """Encode now what prompts ask for again, likewise."""
        ...

    def measure_drift(self) -> None:
        """Compare the answers that wait for it with full prefill now, likewise."""
        ...

    def drift(self, salt: str = "") -> tuple[DriftStats, ...]:
        """How far a salt's answers were from full prefill, as far as they were compared. Cheap, from any thread."""
        ...

    def policy_taken(self, policy: ReusePolicy, salt: str, schema: str, digest: str) -> ReusePolicy:
        """The policy that a request gets that asks for this one: a safer one where answers under it are too far.

        salt, schema, digest: see EngineRequest. Cheap, from any thread.
        """
        ...

    def lift_fallback(self, salt: str, schema: str | None = None) -> int:
        """Give what is asked for again; see DriftLog.lift. Cheap, from any thread."""
        ...

    def pump(self) -> None:
        """Take one step, where callers' threads step the engine. Raises InlayError inside a step."""
        ...

    @property
    def busy(self) -> bool:
        """Whether an engine of this process has anything to do. At no cost, from any thread."""
        ...

    def stats(self) -> EngineStats:
        """What it is doing, and how full its pool is. Cheap, from any thread."""
        ...

    def check_health(self) -> None:
        """Raises InlayError, with the reason, where nothing is done any more."""
        ...

    def shutdown(self) -> None:
        """End it behind its current step; requests under way end with an error."""
        ...
