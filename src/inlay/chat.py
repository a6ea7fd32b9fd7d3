"""Chat turns in the model's own template.

A template is rendered whole, with a sentinel for the body of every turn, and split on the sentinels: the pieces are
what the template puts before, between and after the turns. So inlay follows any template without knowing it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from inlay.errors import ModelError

logger = logging.getLogger(__name__)

_SENTINEL = "Qinlay{}bodyQ"


class ChatTemplate:
    """The chat template of one tokenizer, as pieces around the bodies of turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._warned: set[str] = set()
        self._pieces = lru_cache(maxsize=1024)(self._split)

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has a chat template at all."""
        return bool(self._tokenizer.chat_template)

    def pieces(self, roles: Sequence[str], *, generation: bool) -> tuple[str, ...]:
        """What stands around the bodies of turns in these roles: one piece more than there are turns.

        generation: whether the last piece opens the assistant's answer.
        Raises ModelError where the tokenizer has no template, or its template refuses the turns or drops a body.
        """
        return self._pieces(tuple(roles), generation)

    def opening_pieces(self, roles: Sequence[str]) -> tuple[str, ...]:
        """The pieces before and between the turns of a schema, without what closes the last one.

        Templates that refuse such turns alone, or fold a system turn into the user turn behind it, are asked again
        with a user turn added.
        """
        try:
            return self.pieces(roles, generation=False)[:-1]
        except ModelError:
            return self.pieces([*roles, "user"], generation=False)[: len(roles)]

    def trims(self, role: str) -> bool:
        """Whether the template strips white space around the body of a turn in this role."""
        padded = "\n " + _SENTINEL.format(0) + " \n"
        try:
            turns = [(role, padded)] if role == "user" else [(role, padded), ("user", _SENTINEL.format(1))]
            return padded not in self._render(turns, generation=False)
        except ModelError:
            return False

    def verify(self, roles: Sequence[str], bodies: Sequence[str], pieces: Sequence[str]) -> None:
        """Render once more with the real bodies, and warn, once for a difference, where the pieces do not give that."""
        built = "".join(part for pair in zip(pieces, [*bodies, ""], strict=True) for part in pair)
        try:
            real = self._render(list(zip(roles, bodies, strict=True)), generation=True)
        except ModelError as error:
            self.warn_once(f"the chat template refuses the text of this prompt: {error}")
            return
        if real != built:
            at = next((i for i, (a, b) in enumerate(zip(real, built, strict=False)) if a != b), len(built))
            self.warn_once(
                "the chat template changes the text of turns (it strips, merges or rewrites them): the prompt differs "
                f"from its rendering, first at …{built[max(0, at - 20) : at + 20]!r}; inlay keeps the text as written"
            )

    def warn_once(self, message: str) -> None:
        """Log a warning, once for each kind of message."""
        kind = message.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", message)

    def _split(self, roles: tuple[str, ...], generation: bool) -> tuple[str, ...]:
        bodies = [_SENTINEL.format(number) for number in range(len(roles))]
        rest = self._render(list(zip(roles, bodies, strict=True)), generation=generation)
        pieces = []
        for number, body in enumerate(bodies):
            if rest.count(body) != 1:
                raise ModelError(
                    f"the chat template does not show the body of turn {number + 1} ({roles[number]}) once"
                )
            piece, rest = rest.split(body)
            pieces.append(piece)
        return (*pieces, rest)

    def _render(self, turns: list[tuple[str, str]], *, generation: bool) -> str:
        return self.render([{"role": role, "content": body} for role, body in turns], generation=generation)

    def render(self, messages: Sequence[Mapping[str, Any]], *, generation: bool = True) -> str:
        """Chat messages as the template writes them. Raises ModelError where it refuses them."""
        if not self.exists:
            raise ModelError("the model's tokenizer has no chat template; write prompts without chat turns")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ModelError(f"the chat template refuses turns in the order {roles}: {error}") from error
