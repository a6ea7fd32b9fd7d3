"""Makes engine requests, with the state of their answers, from prepared requests."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from itertools import count

from inlay.engine.prompt_state import PromptState
from inlay.engine.request import Answer, PromptEmbedding, PromptScores, Request, SamplingState
from inlay.errors import ParameterError
from inlay.kv.identity import SegmentSpec, fingerprint_under
from inlay.models.load import LoadedModel, stop_ids
from inlay.prompt.request import EngineRequest
from inlay.sampling.params import SamplingParams
from inlay.sampling.row import BadWords, Row, SeenTokens, TokenRules, seen_of, tokenized
from inlay.sampling.sampler import request_seed
from inlay.sampling.structured import Grammars, Guide, LaterGuide, ends_with


class RequestFactory:
    """Makes the requests of one model. Thread-safe.

    Args:
        entropy: the source of seeds for requests without one.
        adapters: the digests of the loaded adapters.
        forms: returns the readable forms of a segment, most exact first. None for computed forms only.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        entropy: int,
        adapters: Container[bytes] = (),
        forms: Callable[[SegmentSpec], Iterable[SegmentSpec]] | None = None,
    ) -> None:
        self._loaded = loaded
        self._adapters = adapters
        self._entropy = entropy
        self._forms = forms
        self.stop_ids = stop_ids(loaded)
        self.grammars = Grammars(loaded.tokenizer, loaded.spec.vocab_size, self.stop_ids)
        self._rules: dict[int, TokenRules] = {}  # by id() of live parameters
        self._numbers = count()  # request numbers for seeds; used from any thread

    def guide(self, params: SamplingParams, salt: str = "") -> Guide | None:
        """The initial guide of an answer with a grammar; None without one. Compiles the grammar.

        Args:
            salt: the cache salt of the request.

        Raises:
            ParameterError: the grammar is invalid.
        """
        if params.structured_outputs is None:
            return None
        return self.grammars.guide(params.structured_outputs, salt)

    def make(self, prepared: EngineRequest, guide: Guide | None = None) -> Request:
        """Make the first answer of a prompt. If ``n`` asks for several answers, the others are its followers.

        Args:
            guide: the result of ``guide``, if it was called already.

        Raises:
            ParameterError: the request was prepared for another model or for an unknown adapter.
        """
        if prepared.fingerprint != fingerprint_under(self._loaded.fingerprint, prepared.adapter):
            raise ParameterError(
                "the request was prepared for another model; prepare it for this one", code="request.other_model"
            )
        if prepared.adapter and prepared.adapter not in self._adapters:
            raise ParameterError(
                "the request was prepared for an adapter that is not here; load it first", code="adapter.unknown"
            )
        guide = guide or self.guide(prepared.params, prepared.salt)
        number, prompt = (
            next(self._numbers),
            PromptState(prepared if self._forms is None else prepared.with_forms(self._forms)),
        )
        rules, seen = self._rules_of(prepared.params), seen_of(prepared.params, prepared.ids)
        leader = self._answer(number, 0, prompt, guide, rules, seen)
        if prepared.params.prompt_logprobs is not None:
            leader.scores = PromptScores(prepared.ids, prepared.params.prompt_logprobs)
        if prepared.params.pooling is not None:
            leader.embedding = PromptEmbedding(len(prepared.ids), prepared.params.pooling)
        for index in range(1, prepared.params.n):
            follower = self._answer(number, index, prompt, guide, rules, seen)
            follower.leader = leader
            leader.followers.append(follower)
        return leader

    def _rules_of(self, params: SamplingParams) -> TokenRules:
        """The token rules of these parameters, made once because their fields may be long."""
        rules = self._rules.get(id(params))
        if rules is None:
            words = tokenized(params.bad_words, self._loaded.tokenizer)
            stops = () if params.ignore_eos else self.stop_ids
            # A grammar allows end-of-sequence wherever the answer is complete; ignore_eos continues while it can.
            never = self.stop_ids if params.structured_outputs is not None and params.ignore_eos else ()
            rules = TokenRules(params, stops, never, BadWords(words) if words else None)
            self._rules[id(params)] = rules
            weakref.finalize(params, self._rules.pop, id(params), None)
        return rules

    def _answer(
        self,
        number: int,
        index: int,
        prompt: PromptState,
        guide: Guide | None,
        rules: TokenRules,
        seen: SeenTokens | None,
    ) -> Request:
        asked = prompt.request
        params, room = asked.params, self._loaded.spec.max_positions - asked.positions[-1] - 1
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        seed = request_seed(params, number, self._entropy, index)
        return Request(
            id=asked.request_id,
            prompt=prompt,
            sampling=SamplingState(
                params,
                self._row(params, asked, seed, guide, rules, seen),
                stop_ids=frozenset() if params.ignore_eos else self.stop_ids,
                limit=min(limit, len(asked.forced)) if asked.forced else limit,
                forced=asked.forced,
            ),
            answer=Answer(),
            index=index,
            priority=asked.priority,
            deadline=asked.deadline,
            tenant=asked.scope.tenant,
            weight=asked.scope.weight,
        )

    def _row(
        self,
        params: SamplingParams,
        asked: EngineRequest,
        seed: int,
        guide: Guide | None,
        rules: TokenRules,
        seen: SeenTokens | None,
    ) -> Row:
        tokenizer, mark, ids, salt = self._loaded.tokenizer, params.reasoning_end, asked.ids, asked.salt
        own = None if guide is None else guide.copy()
        later: LaterGuide | None = None
        if own is not None and mark is not None and not ends_with(ids, mark, tokenizer):
            start, opening = params.reasoning_start, None
            if start is not None and not ends_with(ids, start, tokenizer):
                opening = self.grammars.guide({"text": start}, salt)
            later = LaterGuide(own, mark, tokenizer, opening)
            own = later.now
        return Row(params, seed, guide=own, later=later, rules=rules, seen=seen)
