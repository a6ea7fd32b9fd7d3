"""A conversation with a model: it asks questions and obeys commands. It neither reads input nor handles signals."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inlay.cli.documents import DocumentChat, read_documents
from inlay.diagnostics import Diagnostics
from inlay.errors import ParameterError
from inlay.policy import PolicyFields, ReusePolicy
from inlay.wording import clip, counted, listed

if TYPE_CHECKING:
    from inlay.client.async_llm import AsyncLLM
    from inlay.sampling.params import SamplingParams
    from inlay.types import RequestOutput, Usage

Say = Callable[[str], None]

HELP = {
    "/add FILE…": "show text files to the next questions; each is computed once",
    "/use NAME…": "show these documents alone, in this order",
    "/drop NAME…": "hide documents; they stay cached",
    "/reuse POLICY [RECOMPUTE]": "choose the reuse policy, as in /reuse modular profiled:0.15",
    "/explain": "show the source of the last prompt's tokens",
    "/stats": "show the cache and the sums of this session",
    "/clear": "forget questions and answers; documents stay",
    "/help": "show this list",
    "/quit": "end the session, as Ctrl-D does",
}
NAMES = tuple(usage.split()[0] for usage in HELP)
KEYS = "A backslash at the end of a line, or Esc and Enter, begin another line. Ctrl-C ends the running answer."


@dataclass(frozen=True, slots=True)
class Explained:
    """The last prompt: its documents, its diagnostics and its usage."""

    documents: list[str]
    diagnostics: Diagnostics | None
    usage: Usage
    policy: ReusePolicy


class ChatSession:
    """One user's session.

    Args:
        params: of every answer.
        policy: the reuse policy. None for the engine's default.
        adapter: the adapter that answers. None for the model alone.
        echo: writes a piece of an answer.
        say: writes a line that a command prints.
        note: writes a line about an answer.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        params: SamplingParams,
        conversation: DocumentChat,
        *,
        policy: ReusePolicy | None = None,
        adapter: str | None = None,
        echo: Say,
        say: Say,
        note: Say,
    ) -> None:
        self.conversation = conversation
        self.ended = False
        self._llm = llm
        self._params = params
        self._policy = policy
        self._adapter = adapter
        self._echo, self._say, self._note = echo, say, note
        self._last: Explained | None = None
        self._questions = self._prompt_tokens = self._cached_tokens = 0

    async def take(self, line: str) -> None:
        """Obey a command, or answer a question. Cancelling it ends the answer. Raises InlayError."""
        if not line.strip():
            return
        if line.startswith("/"):
            await self._obey(line)
        else:
            await self._answer(line)

    async def _answer(self, text: str) -> None:
        from asyncio import CancelledError

        question = self.conversation.next(text)
        messages = self.conversation.messages(question)
        policy = self._llm.policy_for(messages, self._policy, adapter=self._adapter)
        names = [*(name for one in self.conversation.asked for name in one.documents), *question.documents]
        output: RequestOutput | None = None
        said = ""
        try:
            asked = self._llm.generate(messages, self._params, reuse=policy, adapter=self._adapter, diagnostics=True)
            async for output in asked:
                so_far = output.outputs[0].text
                self._echo(so_far[len(said) :])
                said = so_far
        except CancelledError:
            if output is None:
                self._note("(stopped before the first token)")
            raise
        finally:  # an interrupted answer counts as far as it came
            if output is not None:
                question.answer = said
                self.conversation.keep(question)
                self._echo("\n")
                self._count(names, output, policy)

    def _count(self, documents: list[str], output: RequestOutput, policy: ReusePolicy) -> None:
        usage, metrics, answer = output.usage, output.metrics, output.outputs[0]
        self._last = Explained(documents, output.diagnostics, usage, policy)
        self._questions += 1
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens
        first = metrics.ttft_s or 0.0
        told = [f"{first:.2f} s to the first token"]
        if metrics.total_s is not None and metrics.total_s > first and len(answer.token_ids) > 1:
            told.append(f"{(len(answer.token_ids) - 1) / (metrics.total_s - first):,.0f} tokens/s")
        told.append(_share(usage.cached_tokens, usage.prompt_tokens))
        if answer.finish_reason is None:
            told.append("stopped")
        elif answer.finish_reason == "length":
            told.append("cut at the most tokens")
        self._note(f"({', '.join(told)})")

    async def _obey(self, line: str) -> None:
        try:
            name, *words = shlex.split(line)
        except ValueError as error:
            raise ParameterError(
                f"{clip(line)}: {str(error).lower()}; close the quotation marks", code="chat.wrong_arguments"
            ) from None
        commands: dict[str, tuple[Callable[[list[str]], Awaitable[None]], int, int | None]] = {
            "/add": (self._add, 1, None),
            "/use": (self._use, 1, None),
            "/drop": (self._drop, 1, None),
            "/reuse": (self._reuse, 0, 2),
            "/explain": (self._explain, 0, 0),
            "/stats": (self._stats, 0, 0),
            "/clear": (self._clear, 0, 0),
            "/help": (self._help, 0, 0),
            "/quit": (self._quit, 0, 0),
        }
        if name not in commands:
            raise ParameterError(
                f"{clip(name)} is not a command; use one of {', '.join(commands)}", code="chat.unknown_command"
            )
        obey, fewest, most = commands[name]
        if len(words) < fewest or (most is not None and len(words) > most):
            written = next(usage for usage in HELP if usage.split()[0] == name)
            raise ParameterError(
                f"{clip(line)}: the command is {written}; give it these words", code="chat.wrong_arguments"
            )
        await obey(words)

    async def _add(self, words: list[str]) -> None:
        names = self.conversation.add(read_documents(words))
        self._say(f"added {', '.join(names)}")

    async def _use(self, words: list[str]) -> None:
        self.conversation.use(words)
        self._told_seen()

    async def _drop(self, words: list[str]) -> None:
        self.conversation.drop(words)
        self._told_seen()

    def _told_seen(self) -> None:
        seen = self.conversation.seen
        self._say(f"the next question sees {', '.join(seen)}" if seen else "the next question sees no document")

    async def _reuse(self, words: list[str]) -> None:
        if words:
            policy = PolicyFields(words[0], words[1] if len(words) > 1 else None).policy(deprecated=self._note)
            self._llm.policy(policy, adapter=self._adapter)  # refuses a policy that the model does not support
            self._policy = policy
        self._say(f"reuse: {self._llm.policy(self._policy, adapter=self._adapter).in_words()}")

    async def _explain(self, words: list[str]) -> None:
        if self._last is None:
            raise ParameterError("nothing was asked yet; ask a question first", code="chat.nothing_asked")
        last = self._last
        rows = [
            ("document", "tokens", "cached", "from, or why not"),
            *(
                (name, f"{tokens:,}", f"{cached:,}", place)
                for name, tokens, cached, place in rows_of(
                    last.documents, last.diagnostics, last.usage, modular=last.policy.modular
                )
            ),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, tokens, cached, place in rows:
            self._say(f"{name:{widths[0]}}  {tokens:>{widths[1]}}  {cached:>{widths[2]}}  {place}".rstrip())
        self._say(f"{usage_in_words(last.usage)}; reuse {last.policy.in_words()}; positions {last.policy.positions}")

    async def _stats(self, words: list[str]) -> None:
        stats = self._llm.stats()
        self._say(f"{counted(self._questions, 'question')}, {_share(self._cached_tokens, self._prompt_tokens)}")
        self._say(
            f"pool: {counted(stats.segments, 'segment')}, {counted(stats.stored_tokens, 'token')}, "
            f"{stats.used_chunks:,} of {stats.chunks:,} chunks used"
        )
        if stats.disk is not None:
            self._say(f"disk: {counted(stats.disk.segments, 'segment')}, {stats.disk.bytes / 2**20:,.1f} MiB")
        hidden = [name for name in self.conversation.documents if name not in self.conversation.seen]
        self._say(f"documents: {listed(self.conversation.seen) or 'none'}; dropped: {listed(hidden) or 'none'}")

    async def _clear(self, words: list[str]) -> None:
        self.conversation.clear()
        self._told_seen()

    async def _help(self, words: list[str]) -> None:
        width = max(map(len, HELP))
        for usage, text in HELP.items():
            self._say(f"{usage:{width}}  {text}")
        self._say(KEYS)

    async def _quit(self, words: list[str]) -> None:
        self.ended = True


def _share(cached: int, tokens: int) -> str:
    return f"{cached / tokens if tokens else 0:.0%} of {counted(tokens, 'prompt token')} cached"


def rows_of(
    documents: Sequence[str], diagnostics: Diagnostics | None, usage: Usage, *, modular: bool
) -> list[tuple[str, int, int, str]]:
    """Return the rows of /explain: name, tokens, cached tokens and source of each document, then of all other text.

    The source is the tier that the document was read from, or the reason why it was computed.

    Args:
        documents: their names, in the order of the prompt.
        diagnostics: of the request. If they lack a module for each document, all text is one row. This happens if the
            chat template rewrites the messages, or the answer was stopped.
        usage: of the request.
        modular: True if the policy reads modules. If False, a document can only be part of an exact prefix.
    """
    modules = () if diagnostics is None else diagnostics.modules
    rows = []
    if len(modules) == len(documents):
        for name, module in zip(documents, modules, strict=True):
            found = module.tier if modular else "exact prefix"
            place = module.reason or (found if module.tier else "no such prefix")
            rows.append((name, module.tokens, module.tokens - module.computed_tokens, place))
    tokens = usage.prompt_tokens - sum(row[1] for row in rows)
    cached = usage.cached_tokens - sum(row[2] for row in rows)
    return [*rows, ("other text", tokens, max(0, min(tokens, cached)), "")]


_FORMS = ("exact", "promoted", "scaffold", "anchored", "primed", "isolated", "shifted", "recomputed", "across")


def usage_in_words(usage: Usage) -> str:
    """Return the counts of a request in one line."""
    cached = f"{usage.cached_tokens:,} of {counted(usage.prompt_tokens, 'prompt token')} cached"
    forms = [f"{getattr(usage, f'{form}_tokens'):,} {form}" for form in _FORMS if getattr(usage, f"{form}_tokens")]
    tiers = [f"{getattr(usage, f'{tier}_tokens'):,} from {tier}" for tier in ("host", "disk", "shared")]
    tiers = [each for each in tiers if not each.startswith("0 ")]
    missed = [f"{tokens:,} {reason}" for reason, tokens in usage.misses]
    lines = [cached + (f" ({', '.join([*forms, *tiers])})" if forms or tiers else "")]
    return "; ".join([*lines, *([f"missing: {', '.join(missed)}"] if missed else [])])
