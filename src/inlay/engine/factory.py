"""From a request as it was prepared to the state of its answers in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from inlay.engine.answer import Answer, SamplingState
from inlay.engine.request import PromptState, Request
from inlay.engine.sampler.row import Row
from inlay.engine.sampler.sampler import request_seed
from inlay.engine.structured import Grammars, Guide
from inlay.errors import ParameterError
from inlay.models.load import LoadedModel, stop_ids
from inlay.prompt.request import EngineRequest
from inlay.types import SamplingParams


class RequestFactory:
    """Makes the requests of one model. Any thread may ask. entropy: what seeds come from where requests bring none."""

    def __init__(self, loaded: LoadedModel, entropy: int) -> None:
        self._loaded = loaded
        self._entropy = entropy
        self.stop_ids = stop_ids(loaded)
        self.grammars = Grammars(loaded.tokenizer, loaded.spec.vocab_size, self.stop_ids)
        self._numbers = count()  # of requests, for their seeds; on whatever thread

    def guide(self, params: SamplingParams, salt: str = "") -> Guide | None:
        """The start of an answer in the language that it has to be in; a grammar is compiled for that.

        salt: whose request it is. Raises ParameterError.
        """
        if params.structured_outputs is None:
            return None
        return self.grammars.guide(params.structured_outputs, salt)

    def make(self, prepared: EngineRequest, guide: Guide | None = None) -> Request:
        """The first of a prompt's answers; the others, where ``n`` asks for more, follow it.

        guide: of ``guide``, where it is known already. Raises ParameterError.
        """
        if prepared.fingerprint != self._loaded.fingerprint:
            raise ParameterError("the request was prepared for another model; prepare it for this one")
        guide = guide or self.guide(prepared.params, prepared.salt)
        number, prompt = next(self._numbers), PromptState(prepared)
        leader = self._answer(number, 0, prompt, guide)
        for index in range(1, prepared.params.n):
            follower = self._answer(number, index, prompt, guide)
            follower.leader = leader
            leader.followers.append(follower)
        return leader

    def _answer(self, number: int, index: int, prompt: PromptState, guide: Guide | None) -> Request:
        asked = prompt.request
        params, room = asked.params, self._loaded.spec.max_positions - asked.positions[-1] - 1
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        seed = request_seed(params, number, self._entropy, index)
        return Request(
            id=asked.request_id,
            prompt=prompt,
            sampling=SamplingState(
                params,
                self._row(params, asked.ids, seed, guide),
                stop_ids=frozenset() if params.ignore_eos else self.stop_ids,
                limit=min(limit, len(asked.forced)) if asked.forced else limit,
                forced=asked.forced,
            ),
            answer=Answer(),
            index=index,
            priority=asked.priority,
            deadline=asked.deadline,
            tenant=asked.tenant,
            weight=asked.weight,
        )

    def _row(self, params: SamplingParams, ids: Sequence[int], seed: int, guide: Guide | None) -> Row:
        return Row(
            params,
            seed,
            prompt_ids=ids,
            stop_ids=() if params.ignore_eos else self.stop_ids,
            # A grammar offers end-of-sequence wherever the answer is whole; ignore_eos goes on while it can.
            never=self.stop_ids if guide is not None and params.ignore_eos else (),
            guide=None if guide is None else guide.copy(),
        )
