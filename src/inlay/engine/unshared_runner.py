"""Passes of models that are served without reuse: each request runs through the stock model with its own cache.

The cache from transformers (KV, convolution and recurrent states) belongs to the request's allocation. The pool only
counts: a slot stands for the cache of one token.

The probe at load time checks that a text in pieces, interleaved with another text, gives the same logits as in one
piece.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from inlay.attention.backend import Backend
from inlay.attention.plan import Plan
from inlay.engine.allocation import SequenceStates, Work
from inlay.engine.probes import TOLERANCE, error_of, probe_ids
from inlay.engine.runner import Runner
from inlay.errors import CapacityError, ModelError
from inlay.models.device import on_device
from inlay.models.load import LoadedModel

NAMES = ("cache", "past_key_values", "cache_params", "state")


def cache_keyword(model: nn.Module) -> str | None:
    """The keyword under which a model takes the cache of the text so far; None if it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in NAMES if name in parameters), None)


def with_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword argument that gives a model a cache. Raises TypeError if the model takes none."""
    keyword = cache_keyword(model)
    if keyword is None:
        raise TypeError(f"{type(model).__name__} takes no cache")
    return {keyword: cache}


def returned_cache(output: Any) -> Any:
    """The cache that a model's call has returned; None if it has returned none."""
    return next((cache for name in NAMES if (cache := getattr(output, name, None)) is not None), None)


#: The most tokens in one call, because its memory grows with them. Later tokens then run one by one.
MOST_WHOLE = 8192

_LONG, _SHORT = 48, 16  # lengths of the texts that measure the cache of a token

#: Exceptions that third-party code raises when called in an unsupported way.
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, NotImplementedError, AssertionError)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of a stock model's cache.

    Attributes:
        bytes_per_token: bytes per token.
        state_bytes: bytes independent of the length.
        in_steps: True if tokens after the first call must run one by one, because the model's code ignores the states
            when several come. A prompt then waits until it is complete, or until MOST_WHOLE tokens are there.
    """

    bytes_per_token: int
    state_bytes: int
    in_steps: bool = False

    def room(self, budget: int, requests: int, positions: int) -> tuple[int, int]:
        """How many requests may run at once, and how many tokens of cache a budget in bytes then holds.

        If tokens take room too, at most half of the budget goes to states.

        Args:
            requests, positions: the most requests, and the most positions of each.

        Raises:
            CapacityError: the budget does not hold one state.
        """
        for_states = budget // 2 if self.bytes_per_token else budget
        fitting = min(requests, for_states // self.state_bytes) if self.state_bytes else requests
        if fitting < 1:
            least = self.state_bytes * (2 if self.bytes_per_token else 1)
            raise CapacityError(
                f"kv_memory of {budget} bytes holds no state of a request, which takes {self.state_bytes} bytes; give "
                f"at least {least}",
                code="cache.pool_too_small",
            )
        left = budget - fitting * self.state_bytes
        most = fitting * positions
        return fitting, min(most, left // self.bytes_per_token) if self.bytes_per_token else most


class UnsharedRunner(Runner):
    """Runs work through a stock model, one request after another."""

    def __init__(self, loaded: LoadedModel, backend: Backend) -> None:
        super().__init__(loaded, backend, 0)
        self.graphs = None
        self.shape = CacheShape(0, 0)
        parameters = inspect.signature(loaded.model.forward).parameters
        self._cache_keyword = cache_keyword(loaded.model)
        self._picks = "logits_to_keep" in parameters
        self._places = "position_ids" in parameters

    def probe(self) -> CacheShape:
        """Measure the cache. Raises ModelError if a text in pieces gives other logits than in one piece."""
        if self._cache_keyword is None:
            raise self._refusal("it keeps nothing of a text between two calls")
        why = ""
        for in_steps in (False, True):
            try:
                self.shape = replace(self._measured(), in_steps=in_steps)
                off = self._off_in_pieces()
            except _FAILURES as error:
                why = f"it does not run a text in pieces: {type(error).__name__}: {error}".splitlines()[0][:300]
                continue
            if off <= TOLERANCE[self._loaded.model.dtype]:
                return self.shape
            why = f"a text in pieces changes its logits by {off:.2g} of their spread"
        raise self._refusal(why)

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"{self._loaded.name} cannot be served: transformers' own code computes it, and {why}",
            code="model.not_servable",
        )

    def _measured(self) -> CacheShape:
        short, long = (self._cache_bytes(tokens) for tokens in (_SHORT, _LONG))
        per_token = max(0, long - short) // (_LONG - _SHORT)
        return CacheShape(per_token, max(0, short - _SHORT * per_token))

    def check_cost(self, tokens: int) -> int:
        """See Runner.check_cost. No policy of these models ends a pass early."""
        return tokens

    def run(
        self,
        work: Sequence[Work],
        rows: Sequence[int],
        plan: Plan | None = None,
        ids: Tensor | None = None,
        await_layer: Callable[[int], None] | None = None,
        hidden: list[Tensor] | None = None,
    ) -> Tensor:
        """See Runner.run. The plan and ``await_layer`` are not used, and no request asks for hidden states."""
        found, first, wanted = [], 0, set(rows)
        device = self.backend.device
        with on_device(device), torch.inference_mode():
            for each in work:
                count = each.part.rows
                own = torch.tensor(each.ids, device=device) if ids is None else ids[first : first + count]
                asked = [row - first for row in range(first, first + count) if row in wanted]
                found.append(self._continued(own, _states_of(each), asked))
                first += count
        logits = torch.cat(found)
        if list(rows) == sorted(wanted):
            return logits
        order = {row: number for number, row in enumerate(sorted(wanted))}
        return logits[[order[row] for row in rows]]

    def _continued(self, ids: Tensor, states: SequenceStates, wanted: Sequence[int]) -> Tensor:
        """Continue a request and return the logits of the wanted rows, (len(wanted), vocabulary)."""
        if not self.shape.in_steps:
            return self._call(ids, states, wanted)
        before = sum(map(len, states.waiting))
        if before and before + len(ids) > MOST_WHOLE:
            states.tokens -= before
            self._call(torch.cat(states.waiting), states, [])
            states.waiting.clear()
        if states.cache is not None:
            steps = [self._call(ids[row : row + 1], states, [0] if row in wanted else []) for row in range(len(ids))]
            return torch.cat(steps)
        if not wanted:  # the last piece of a prompt has wanted rows
            states.waiting.append(ids)
            states.tokens += len(ids)
            return torch.empty(0, self.vocabulary, dtype=self._loaded.model.dtype, device=ids.device)
        whole = torch.cat([*states.waiting, ids])
        states.waiting.clear()
        states.tokens -= before
        return self._call(whole, states, [before + row for row in wanted])

    def _call(self, ids: Tensor, states: SequenceStates, wanted: Sequence[int]) -> Tensor:
        model = self._loaded.model
        said: dict[str, Any] = {}
        if states.cache is not None and self._cache_keyword is not None:
            said[self._cache_keyword] = states.cache
        picked = torch.tensor(wanted, dtype=torch.int64, device=ids.device)
        if self._picks:
            said["logits_to_keep"] = picked
        if self._places:
            said["position_ids"] = torch.arange(states.tokens, states.tokens + len(ids), device=ids.device)[None]
        output = model(input_ids=ids[None], use_cache=True, **said)
        kept = returned_cache(output)
        if kept is None:
            raise RuntimeError(f"{type(model).__name__} has not returned what it keeps of the text")
        states.cache = kept
        states.tokens += len(ids)
        logits: Tensor = output.logits[0]
        return logits if self._picks else logits[picked]

    def _cache_bytes(self, tokens: int) -> int:
        states = SequenceStates()
        with on_device(self.backend.device), torch.inference_mode():
            self._call(self._text(0, tokens), states, [])
        return sum({each.untyped_storage().data_ptr(): each.nbytes for each in _tensors(states.cache, set())}.values())

    def _text(self, number: int, tokens: int) -> Tensor:
        ids = probe_ids(self._loaded.spec, number)
        return torch.tensor((ids * -(-tokens // len(ids)))[:tokens], device=self.backend.device)

    def _off_in_pieces(self) -> float:
        """Return the error of two texts in interleaved pieces, against each in one piece: the least over few pairs."""
        return min(self._off_of(pair) for pair in range(3))

    def _off_of(self, pair: int) -> float:
        texts = [self._text(2 * pair + number, 24) for number in (0, 1)]
        both = [SequenceStates(), SequenceStates()]
        found: list[list[Tensor]] = [[], []]
        with on_device(self.backend.device), torch.inference_mode():
            at = 0
            for size in (11, 8, 1, 1, 3):
                for text, states, own in zip(texts, both, found, strict=True):
                    own.append(self._continued(text[at : at + size], states, range(size)))
                at += size
            whole = [self._call(text, SequenceStates(), range(24)) for text in texts]
        return max(error_of(torch.cat(own), each) for own, each in zip(found, whole, strict=True))


def _states_of(work: Work) -> SequenceStates:
    """The request's state. Raises RuntimeError if it does not end at the start of the work."""
    assert work.states is not None, "work of requests has their states"
    if work.part.start != work.states.tokens:
        raise RuntimeError(f"a part starts at {work.part.start} behind {work.states.tokens} tokens")
    return work.states


def _tensors(kept: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors inside a model's cache object of any type."""
    if id(kept) in seen:
        return
    seen.add(id(kept))
    if isinstance(kept, Tensor):
        yield kept
        return
    inside: Iterable[Any] = ()
    if isinstance(kept, dict):
        inside = kept.values()
    elif isinstance(kept, list | tuple):
        inside = kept
    elif hasattr(kept, "__dict__") and not isinstance(kept, type | torch.nn.Module):
        inside = vars(kept).values()
    for each in list(inside):
        yield from _tensors(each, seen)
