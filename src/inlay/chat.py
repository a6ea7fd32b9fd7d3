"""Chat turns in the model's own template.

A template is rendered whole, with a sentinel for the body of every turn, and split on the sentinels: the pieces are
what the template puts before, between and after the turns. So inlay follows any template without knowing it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, product, takewhile
from operator import eq
from typing import Any

from transformers import PreTrainedTokenizerBase

from inlay.errors import ModelError

logger = logging.getLogger(__name__)

_SENTINEL = "7310946{:04d}9512683"  # no letters: a template that changes their case shows it all the same
_BEFORE, _AFTER = "\n\t\n", "\n \n"  # white space around a body, to see what the template leaves of it
_STRIPPED = ("", "\n", None)


@dataclass(frozen=True, slots=True)
class Trim:
    """The characters that a template strips from the ends of a turn's body; None for all white space."""

    left: str | None = ""
    right: str | None = ""

    def start(self, text: str) -> str:
        return text.lstrip(self.left)

    def end(self, text: str) -> str:
        return text.rstrip(self.right)


class ChatTemplate:
    """The chat template of one tokenizer, as pieces around the bodies of turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._warned: set[str] = set()
        self._pieces = lru_cache(maxsize=1024)(self._find_pieces)
        self._trims = lru_cache(maxsize=1024)(self._find_trims)

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

    def trims(self, roles: Sequence[str], *, generation: bool) -> tuple[Trim, ...]:
        """What the template strips from the body of each of these turns. Arguments and errors as of ``pieces``."""
        return self._trims(tuple(roles), generation)

    def opening_pieces(self, roles: Sequence[str]) -> tuple[str, ...]:
        """The pieces before and between the turns of a schema, without what closes the last one.

        Templates that refuse such turns alone, or fold a system turn into the user turn behind it, are asked again
        with a user turn added.
        """
        return self.pieces(self._accepted(roles), generation=False)[: len(roles)]

    def opening_trims(self, roles: Sequence[str]) -> tuple[Trim, ...]:
        """What the template strips from the bodies of a schema's turns, asked as in ``opening_pieces``."""
        return self.trims(self._accepted(roles), generation=False)[: len(roles)]

    def verify(
        self, roles: Sequence[str], bodies: Sequence[str], pieces: Sequence[str], *, generation: bool = True
    ) -> None:
        """Render once more with the real bodies, and warn, once for a difference, where the pieces do not give that."""
        parts = [part for pair in zip(pieces, [*bodies, ""], strict=True) for part in pair]
        built = "".join(parts)
        try:
            real = self._render(list(zip(roles, bodies, strict=True)), generation=generation)
        except ModelError as error:
            self.warn_once(f"the chat template refuses the text of this prompt: {error}")
            return
        if real != built:
            at = sum(takewhile(bool, map(eq, real, built)))
            ends = list(accumulate(map(len, parts)))[1::2]  # of the bodies
            turn = next((number for number, end in enumerate(ends[: len(roles)]) if at < end), len(roles) - 1)
            self.warn_once(
                "the chat template changes the text of turns (it strips, merges or rewrites them): the prompt differs "
                f"from its rendering, first at turn {turn + 1} ({roles[turn]}), near "
                f"{built[max(0, at - 20) : at + 20]!r}; inlay keeps the text as written"
            )

    def warn_once(self, message: str) -> None:
        """Log a warning, once for each kind of message: what it says before its first colon."""
        kind = message.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", message)

    def _accepted(self, roles: Sequence[str]) -> Sequence[str]:
        """These roles, with a user turn behind them where the template wants one. Raises ModelError."""
        try:
            self.pieces(roles, generation=False)
        except ModelError as error:
            try:
                self.pieces([*roles, "user"], generation=False)
            except ModelError:
                raise error from None  # it speaks of the turns that the schema has
            return [*roles, "user"]
        return roles

    def _find_pieces(self, roles: tuple[str, ...], generation: bool) -> tuple[str, ...]:
        return self._split(roles, generation, "", "")

    def _find_trims(self, roles: tuple[str, ...], generation: bool) -> tuple[Trim, ...]:
        bare = self.pieces(roles, generation=generation)
        try:
            padded = self._split(roles, generation, _BEFORE, _AFTER)
        except ModelError:
            return tuple(Trim() for _ in roles)
        whole = [_AFTER + padded[0], *padded[1:-1], padded[-1] + _BEFORE] if roles else []
        stripped = list(chain.from_iterable(map(_stripped, bare, whole)))[1:-1]
        return tuple(Trim(left, right) for left, right in zip(stripped[::2], stripped[1::2], strict=True))

    def _split(self, roles: tuple[str, ...], generation: bool, before: str, after: str) -> tuple[str, ...]:
        """The rendering of sentinels between ``before`` and ``after``, split on the sentinels alone."""
        sentinels = [_SENTINEL.format(number) for number in range(len(roles))]
        bodies = [before + sentinel + after for sentinel in sentinels]
        rest = self._render(list(zip(roles, bodies, strict=True)), generation=generation)
        for number, sentinel in enumerate(sentinels):
            if rest.count(sentinel) != 1:
                raise ModelError(
                    f"the chat template does not show the body of turn {number + 1} ({roles[number]}) once, "
                    f"for turns in the order {', '.join(roles)}"
                )
        pieces = []
        for number, sentinel in enumerate(sentinels):
            piece, found, rest = rest.partition(sentinel)
            if not found:
                raise ModelError(
                    f"the chat template moves the body of turn {number + 1} ({roles[number]}) in front of another one, "
                    f"for turns in the order {', '.join(roles)}"
                )
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
        except Exception as error:  # a template is a program that came with the model: it can fail in any way
            roles = ", ".join(str(message.get("role")) for message in messages)
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"the chat template refuses turns in the order {roles}: {reason}") from error


def _stripped(bare: str, padded: str) -> tuple[str | None, str | None]:
    """What was stripped behind the body in front of a piece, and before the body behind it."""
    for right, left in product(_STRIPPED, repeat=2):
        if padded == _AFTER.rstrip(right) + bare + _BEFORE.lstrip(left):
            return right, left
    return "", ""
