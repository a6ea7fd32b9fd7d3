"""From a placed prompt and its parameters to a request, with all that can be checked before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from inlay.engine.request import Request
from inlay.engine.sampler.row import Row
from inlay.engine.sampler.sampler import request_seed
from inlay.engine.stream import TextStream
from inlay.engine.structured import Grammars, Guide
from inlay.errors import ContextError, ParameterError, show
from inlay.models.load import LoadedModel, stop_ids
from inlay.prompt.placement import PromptLayout
from inlay.prompt.splice import Splice
from inlay.prompt.tokens import beyond_vocabulary
from inlay.types import SamplingParams


class Intake:
    """Makes the requests of one model. entropy: what seeds come from where requests bring none."""

    def __init__(self, loaded: LoadedModel, entropy: int) -> None:
        self._loaded = loaded
        self._entropy = entropy
        self._stop_ids = stop_ids(loaded)
        self._vocabulary = loaded.spec.vocab_size
        self._grammars = Grammars(loaded.tokenizer, self._vocabulary, self._stop_ids)
        self._numbers = count()  # of requests, on whatever thread

    def guide(self, params: SamplingParams, salt: str = "") -> Guide | None:
        """The start of an answer in the language that it has to be in; a grammar is compiled for that.

        salt: whose request it is. Raises ParameterError.
        """
        if params.structured_outputs is None:
            return None
        return self._grammars.guide(params.structured_outputs, salt)

    def request(
        self, layout: PromptLayout, splice: Splice, params: SamplingParams, guide: Guide | None = None
    ) -> Request:
        """The first of a prompt's answers; the others, where ``n`` asks for more, follow it.

        guide: of ``guide``, for these parameters.
        Raises ParameterError, and ContextError where the prompt leaves no room for an answer.
        """
        self._check_prompt(layout)
        self._check_tokens(params)
        room = self._room(layout)
        number = next(self._numbers)
        leader = self._answer(number, 0, layout, splice, params, room, guide)
        for index in range(1, params.n):
            follower = self._answer(number, index, layout, splice, params, room, guide)
            follower.leader = leader
            leader.followers.append(follower)
        return leader

    def _answer(
        self,
        number: int,
        index: int,
        layout: PromptLayout,
        splice: Splice,
        params: SamplingParams,
        room: int,
        guide: Guide | None,
    ) -> Request:
        tokenizer = self._loaded.tokenizer
        return Request(
            id=str(number),
            prompt=layout.text or None,
            ids=layout.ids,
            positions=layout.positions,
            splice=splice,
            params=params,
            row=self._row(params, layout.ids, request_seed(params, number, self._entropy, index), guide),
            stop_ids=frozenset() if params.ignore_eos else self._stop_ids,
            limit=room if params.max_tokens is None else min(room, params.max_tokens),
            stream=TextStream(tokenizer, layout.ids, params),
            spell=lambda token: str(tokenizer.decode([token])),
            index=index,
        )

    def _row(self, params: SamplingParams, ids: Sequence[int], seed: int, guide: Guide | None) -> Row:
        return Row(
            params,
            seed,
            prompt_ids=ids,
            stop_ids=() if params.ignore_eos else self._stop_ids,
            # A grammar offers end-of-sequence wherever the answer is whole; ignore_eos goes on while it can.
            never=self._stop_ids if guide is not None and params.ignore_eos else (),
            guide=None if guide is None else guide.copy(),
        )

    def _room(self, layout: PromptLayout) -> int:
        """How many tokens the answer may have."""
        if not layout.ids:
            raise ParameterError("a prompt is empty; give at least one token")
        longest, end = self._loaded.spec.max_positions, layout.positions[-1]
        if end + 1 >= longest:
            raise ContextError(
                f"{_where(layout)}the prompt ends at position {end} and the model's context is {longest} tokens long, "
                "answer included; shorten the prompt, or import fewer modules"
            )
        return longest - end - 1

    def _check_prompt(self, layout: PromptLayout) -> None:
        """Whatever a prompt was made of, an id beyond the vocabulary would end the pass of everybody."""
        if unknown := beyond_vocabulary(layout.ids, self._vocabulary, self._loaded.tokenizer.convert_ids_to_tokens):
            raise ParameterError(f"{_where(layout)}the prompt holds {unknown}")

    def _check_tokens(self, params: SamplingParams) -> None:
        last = self._vocabulary - 1
        for name, tokens in (("stop_token_ids", params.stop_ids), ("logit_bias", params.logit_bias or ())):
            for token in tokens:
                if token > last:
                    raise ParameterError(f"{name} holds token {show(token)}, and the model knows tokens 0 to {last}")


def _where(layout: PromptLayout) -> str:
    return f"{layout.place}: " if layout.place else ""
