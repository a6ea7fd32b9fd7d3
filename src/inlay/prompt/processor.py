"""PromptProcessor turns prompts in any accepted form into engine requests. It needs neither weights nor a store."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from itertools import accumulate
from typing import Any, TypedDict, Unpack

from transformers import PreTrainedTokenizerBase

from inlay.errors import ContextError, ParameterError, Place, PMLError, Problem
from inlay.kv.identity import SegmentSpec, fingerprint_under
from inlay.pml import Prompt, PromptBuilder, resolve
from inlay.policy import ReusePolicy
from inlay.prompt.anchors import Anchor, SeenAnchors
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.composed import CachedSpan, compose_parts, open_end
from inlay.prompt.contexts import PUBLIC, KnownSchemas, readable_adapters
from inlay.prompt.conversation import (
    ContentSpecs,
    anchor_of,
    as_turn,
    fixed_sets,
    has_pieces,
    lay_out_conversation,
)
from inlay.prompt.diagnosis import Comparison, NotedPrompt, sections_of, seen_prompt, tools_digest
from inlay.prompt.free_order import FreeSet, check_count, why_not_free
from inlay.prompt.inputs import (
    Conversation,
    as_prompt,
    check_ids,
    check_messages,
    has_modules,
    is_conversation,
    is_marked,
    tool_ttls,
    unwrap,
    with_marked_parts,
    without_marks,
)
from inlay.prompt.layout import Hole, SchemaLayout, TextRun
from inlay.prompt.model_info import ModelInfo, check_forced, check_prompt, check_tokens, check_weight
from inlay.prompt.placement import ContentPart, Placed, PromptLayout, lay_out_ids, lay_out_prompt
from inlay.prompt.request import EncodeRequest, EngineRequest, PromptPart, RequestFields, kept_to
from inlay.prompt.seen_pieces import PieceFinder, SeenTexts, content_ranges, token_ranges
from inlay.prompt.seen_prompts import SeenPrompts
from inlay.prompt.tokens import TextEncoder, at_seams
from inlay.sampling.params import SamplingParams
from inlay.types import EVERYONE, Scope

logger = logging.getLogger(__name__)

#: The texts that ``marked_parts`` lays out together, since every layout renders the messages in front of them again.
_TOGETHER = 16


class _QueueFields(TypedDict, total=False):
    """The fields of EngineRequest that the prompt does not change."""

    priority: int
    deadline: float | None
    diagnostics: bool


class PromptProcessor:
    """Turns the prompts of one model into engine requests. Thread-safe.

    Args:
        tokenizer: a transformers tokenizer with a ``tokenizers`` backend. Prompts with turns need its chat template.
        placeholders: the filling of parameter holes while modules are encoded, "none" or "unk".
        template_date: the date that the chat template writes, as YYYY-MM-DD. None for today's.
        likely: if True, requests name the modules that may be read next.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: ModelInfo,
        placeholders: str = "none",
        template_date: str | None = None,
        *,
        likely: bool = False,
    ) -> None:
        self._likely = likely
        self._seen = SeenAnchors()
        #: The latest prompts, for diagnostics.
        self.seen_prompts = SeenPrompts()
        #: The texts of marked parts, for calls that name them by hash.
        self.seen_texts = SeenTexts()
        self.tokenizer = tokenizer
        self.model = model
        self.encoder = TextEncoder(tokenizer, model.max_positions)
        day = None if template_date is None else date.fromisoformat(template_date)
        self.template = ChatTemplate(tokenizer, day=day)
        self.schemas = KnownSchemas(model, self.encoder, self.template, placeholders)
        self._pieces = PieceFinder(tokenizer)

    def process(
        self,
        prompt: Any,
        params: SamplingParams,
        policy: ReusePolicy,
        scope: Scope = EVERYONE,
        **fields: Unpack[RequestFields],
    ) -> EngineRequest:
        """Return a prompt as a request, after all checks that are possible before it runs.

        Args:
            policy: a settled policy.
            fields: without ``diagnostics``, which ``process_noted`` takes.

        Raises:
            ParameterError, PMLError, ModelError: for a wrong argument or prompt.
            ContextError: if the prompt leaves no room for an answer.
        """
        return self._process(prompt, params, policy, scope, **fields)[0]

    def process_noted(
        self,
        prompt: Any,
        params: SamplingParams,
        policy: ReusePolicy,
        scope: Scope = EVERYONE,
        **fields: Unpack[RequestFields],
    ) -> tuple[EngineRequest, NotedPrompt]:
        """Return the result of ``process``, and the prompt's entry in the table of seen prompts. Errors as there."""
        request, layout = self._process(prompt, params, policy, scope, **fields)
        chat = self._conversation(prompt)
        owner = scope.tenant, scope.cache_salt
        seen = seen_prompt(request, tools_digest(chat))
        earlier = self.seen_prompts.note(owner, seen)
        noted = NotedPrompt(self.seen_prompts, owner, seen)
        if request.diagnostics:
            sections = sections_of(chat, layout, self.template, self._text_of)
            recurrent = self.model.recurrent
            noted.compare(Comparison(request, seen, earlier, layout, sections, self._text_of, recurrent=recurrent))
        return request, noted

    def _text_of(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def _conversation(self, prompt: Any) -> Conversation | None:
        """Return chat messages in the form of the layout. None for another prompt."""
        given = unwrap(prompt) if isinstance(prompt, Mapping) else prompt
        if not is_conversation(given):
            return None
        chat = given if isinstance(given, Conversation) else Conversation(given)
        return Conversation(tuple(map(with_marked_parts, chat)), without_marks(chat.tools), chat.options)

    def _process(
        self,
        prompt: Any,
        params: SamplingParams,
        policy: ReusePolicy,
        scope: Scope,
        *,
        request_id: str | None = None,
        forced: Sequence[int] = (),
        keep_marked_alone: bool = False,
        **fields: Unpack[_QueueFields],
    ) -> tuple[EngineRequest, PromptLayout]:
        """Return a prompt as a request, with its layout. Arguments as of ``process``."""
        check_weight(scope.weight)
        salt, made_with = scope.cache_salt, self.model.adapter(scope.adapter)
        kept = self._kept(params)
        layout = self._cut(self.lay_out(prompt, policy, salt, kept), kept, params)
        if policy.modular:
            self._note_marked(prompt, salt)
        check_prompt(layout, self.model, self.tokenizer, answered=params.max_tokens != 0)
        check_tokens(params, self.model)
        check_forced(layout, self.model, forced)
        if params.pooling is not None and self.model.why_unshared is not None:
            raise ParameterError(
                f"pooling is {params.pooling!r}, and this model returns no hidden states: {self.model.why_unshared}",
                code="parameter.not_for_this_model",
            )
        needs_all = params.prompt_logprobs is not None or params.pooling == "mean"
        if needs_all:
            policy = policy.alone()  # cached tokens have neither logits nor hidden states
        if policy.finds:
            layout = self._pieces.find(layout, scope, made_with)
        base = self._changed_base(layout, policy, salt) if policy.modular and layout.anchor else None
        parts = self.parts(layout, policy, salt, made_with, base)
        if keep_marked_alone:
            parts = kept_to(parts, layout.marked_end)
        if self.model.recurrent:
            parts = _marked_before(_computed_end(parts), self._opening_tokens(prompt, layout))
        sets = self._sets(layout, policy, scored=needs_all)
        text = layout.text
        if params.prompt_logprobs is not None and not text:
            text = str(self.tokenizer.decode(list(layout.ids)))
        request = EngineRequest(
            request_id=uuid.uuid4().hex if request_id is None else request_id,
            text=text or None,
            ids=layout.ids,
            positions=layout.positions,
            parts=_apart(parts, sets, salt),
            sets=sets,
            policy=policy,
            params=params,
            fingerprint=fingerprint_under(self.model.keys.fingerprint, made_with),
            scope=scope,
            adapter=made_with,
            schema="" if layout.schema is None else layout.schema.schema.name,
            schema_digest="" if layout.schema is None else layout.schema.digest,
            forced=tuple(forced),
            likely=self.schemas.siblings(layout, policy, salt, made_with) if self._likely else (),
            moves_text=layout.in_pieces and policy.moves_text,
            **fields,
        )
        return request, layout

    def _note_marked(self, prompt: Any, salt: str) -> None:
        """Record the texts of marked parts of chat messages."""
        for message in self._conversation(prompt) or ():
            if isinstance(message["content"], Sequence) and not isinstance(message["content"], str):
                self.seen_texts.note(salt, (part["text"] for part in message["content"] if is_marked(part)))

    def forget_texts(self, salt: str) -> None:
        """Drop the texts of earlier requests with this salt that are kept to explain or read later ones."""
        self._seen.forget(salt)
        self._pieces.seen.forget(salt)
        self.seen_prompts.forget(salt)
        self.seen_texts.forget(salt)

    def segments_of(self, prompt: Any, policy: ReusePolicy, scope: Scope = EVERYONE) -> list[SegmentSpec]:
        """Return the module segments that a prompt of any form reads. Raises ParameterError and PMLError."""
        salt, made_with = scope.cache_salt, self.model.adapter(scope.adapter)
        parts = self.parts(self.lay_out(prompt, policy, salt), policy, salt, made_with)
        if policy.modular:
            self._note_marked(prompt, salt)
        return [part.spec for part in open_end(compose_parts(parts, adapter=made_with)) if isinstance(part, CachedSpan)]

    def marked_parts(
        self,
        texts: Sequence[str],
        messages: Sequence[Any],
        policy: ReusePolicy,
        scope: Scope = EVERYONE,
        *,
        alone: bool = False,
    ) -> list[PromptPart | None]:
        """Return each text as a marked part of a user's message behind ``messages``. None for a text without tokens.

        Args:
            alone: True if it is the message's only marked part. False for one of several.

        Raises:
            ParameterError: for wrong messages.
        """
        # A part's segment depends on its place only where nothing can be read at a shift.
        most = 1 if alone or self.model.why_not_shift is not None else _TOGETHER
        found: list[PromptPart | None] = []
        for some in (texts[first : first + most] for first in range(0, len(texts), most)):
            try:
                found += self._marked_parts(some, messages, policy, scope, alone=alone)
            except ContextError:  # together they are longer than the context
                found += [self._marked_parts([text], messages, policy, scope, alone=alone)[0] for text in some]
            self.seen_texts.note(scope.cache_salt, some)
        return found

    def _marked_parts(
        self, texts: Sequence[str], messages: Sequence[Any], policy: ReusePolicy, scope: Scope, *, alone: bool
    ) -> list[PromptPart | None]:
        """See ``marked_parts``. All texts are parts of one message."""
        salt, made_with = scope.cache_salt, self.model.adapter(scope.adapter)
        marked = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]
        question = {"role": "user", "content": [*marked, {"type": "text", "text": "?"}]}
        layout = self.lay_out([*messages, question], policy, salt)
        base = None
        if policy.reads_promoted and layout.anchor:
            base = self._seen.base_of(salt, anchor_of(layout), layout.anchor_own)
        parts = self.parts(layout, policy, salt, made_with, base, alone=alone)
        by_start = {part.start: part for part in parts if part.candidates and part.ids}
        numbers = {
            each.origin.index: each.start
            for each in layout.parts
            if isinstance(each.origin, ContentPart) and each.origin.message == len(messages) and each.ids
        }
        return [None if (start := numbers.get(number)) is None else by_start.get(start) for number in range(len(texts))]

    def encoding(
        self, name: str, specs: Iterable[SegmentSpec], scope: Scope = EVERYONE, *, ttl_s: float | None = None
    ) -> EncodeRequest:
        """Return a request to store segments.

        Args:
            name: the name of the request in messages.
            ttl_s: see EncodeRequest.

        Raises:
            ParameterError: for an unknown adapter or a wrong weight.
        """
        check_weight(scope.weight)
        made_with = self.model.adapter(scope.adapter)
        return EncodeRequest(
            request_id=uuid.uuid4().hex,
            name=name,
            specs=tuple(specs),
            fingerprint=fingerprint_under(self.model.keys.fingerprint, made_with),
            scope=scope,
            adapter=made_with,
            ttl_s=ttl_s,
        )

    def lay_out(self, prompt: Any, policy: ReusePolicy, salt: str = "", kept: int | None = None) -> PromptLayout:
        """Return the token ids and positions of a prompt in any form.

        Args:
            kept: how many tokens to keep at the end, so that the front of a very long text need not be tokenized.
                None for all. A shortened text still has more tokens than this.

        Raises:
            ParameterError, PMLError, ContextError, ModelError: for a wrong or too long prompt.
        """
        if isinstance(prompt, (Prompt, PromptBuilder)):
            return self._lay_out_pml(as_prompt(prompt), policy, salt)
        if isinstance(prompt, Mapping):
            prompt = unwrap(prompt)
        if isinstance(prompt, str):
            (prompt,) = self._bounded([prompt], kept)
            return _as_text(lay_out_ids(self.tokenizer.encode(prompt), prompt))
        if is_conversation(prompt):
            check_messages(prompt)
            whole = kept is None
            return self._lay_out_chat(prompt, kept, in_pieces=policy.modular and whole, find=policy.finds and whole)
        if isinstance(prompt, Sequence):
            return _as_text(lay_out_ids(check_ids(prompt, self.model.vocab_size), ""))
        raise ParameterError(
            f"a prompt is a {type(prompt).__name__}; give text, token ids, chat messages or an inlay.Prompt",
            code="prompt.unknown_form",
        )

    def parts(
        self,
        layout: PromptLayout,
        policy: ReusePolicy,
        salt: str = "",
        adapter: bytes = b"",
        base: Anchor | None = None,
        *,
        alone: bool = True,
    ) -> tuple[PromptPart, ...]:
        """Return the parts of a placed prompt with their candidate segments.

        Args:
            base: see ``ContentSpecs``.
            alone: False to read a message's only marked part as one of several.
        """
        if policy.modular and layout.schema is not None:
            return self._module_parts(layout, layout.schema, policy, salt, adapter)
        if policy.modular and any(isinstance(part.origin, ContentPart) for part in layout.parts):
            movable = self.model.why_not_shift is None
            return ContentSpecs(
                layout,
                anchored=policy.anchored,
                movable=movable,
                keys=self.model.keys,
                salt=salt.encode(),
                adapters=readable_adapters(policy, adapter),
                base=base,
                primer=self.schemas.primer(policy),
                longest=self.model.max_positions,
                only_exact=policy.reads_promoted and alone,
            ).parts()
        known = None
        if layout.schema is not None:
            known = self.schemas.known(layout.schema, PUBLIC if layout.public else salt)

        def in_place(part: Placed) -> PromptPart:
            origin, ttl_s = part.origin, None
            copies: tuple[bytes, ...] = ()
            if isinstance(origin, ContentPart):
                ttl_s = origin.ttl_s
            elif known is not None and isinstance(origin, TextRun | Hole):
                ttl_s = known.ttl_s
                copies = self.schemas.copies(known, origin)
            owned = origin is None or not layout.public
            return PromptPart(
                part.ids, part.start, owned, kept=part.kept, ttl_s=ttl_s, marked=part.marked, copies=copies
            )

        return tuple(map(in_place, layout.parts))

    def _changed_base(self, layout: PromptLayout, policy: ReusePolicy, salt: str) -> Anchor | None:
        """Return the earlier anchor to read modules behind, if this prompt's anchor is a changed version of it.

        None under a policy without promotion.
        """
        changed = self._seen.note(salt, anchor_of(layout), layout.anchor_own, tell=policy.anchored)
        if changed is None:
            return None
        if changed.news:
            logger.warning(
                "the text in front of marked parts changes between requests of one cache_salt, from token %d of %d on, "
                "so modules behind it are not found again: mark the stable part of the system turn with cache_control, "
                "and write the text that changes behind it, in a part without a mark%s",
                changed.first,
                changed.tokens,
                "; until then, modules are read as they were encoded behind an earlier version"
                if policy.reads_promoted
                else "",
            )
        return changed.base if policy.reads_promoted else None

    def _sets(self, layout: PromptLayout, policy: ReusePolicy, *, scored: bool) -> tuple[FreeSet, ...]:
        """Return the sets of a placed prompt; those that the policy fixes carry the reason. Raises ParameterError."""
        movable = not policy.modular or self.model.why_not_shift is None
        why = why_not_free(policy, scored=scored, movable=movable)
        sets = tuple(each.fixed(why) if why else each for each in layout.sets)
        check_count(sets)
        return sets

    def _bounded(self, texts: Sequence[str], kept: int | None) -> Sequence[str]:
        """Return the texts, or only their end if ``kept`` allows. Raises ContextError if they exceed the context."""
        ending = None if kept is None else self.encoder.bound.ending(texts, kept)
        if ending is not None:
            return ending
        self.encoder.bound.check(texts)
        return texts

    def _lay_out_chat(
        self, messages: Sequence[Mapping[str, Any]], kept: int | None, *, in_pieces: bool, find: bool
    ) -> PromptLayout:
        """Lay out chat messages as the template writes them, without a schema.

        The ids are those of the whole rendering, with two exceptions. Messages in parts are encoded part by part.
        A text that spells a special token is cut there, so that no text can open a role.

        Args:
            in_pieces: True if each tool, and each block of a system prompt, may be a module.
            find: True if the layout has its ``texts``.
        """
        self.encoder.bound.check_count(len(messages), "messages")
        given = messages if isinstance(messages, Conversation) else Conversation(messages)
        chat = Conversation(tuple(map(with_marked_parts, given)), without_marks(given.tools), given.options)
        chat.options.check_last(chat)
        template = self.template.told(chat.options)
        if chat:
            template.warn_of_date(as_turn(chat[0]), chat.tools)
        in_pieces = in_pieces and self.model.why_not_shift is None and has_pieces(chat)
        if in_pieces or not all(isinstance(message["content"], str) for message in chat):
            ttls = tool_ttls(given.tools)
            laid = lay_out_conversation(chat, self.encoder, template, in_pieces=in_pieces, ttls=ttls, find=find)
            if laid is not None:
                return laid
            if has_modules(chat):
                template.warn_once(
                    "the chat template rewrites the text of messages with marked parts, so none of them is a module: "
                    "use a template that shows contents as they are"
                )
        generation, continues = chat.options.generation, chat.options.continues
        said = list(map(as_turn, chat))
        rendered = template.render_with_seams(said, tools=chat.tools, generation=generation, continues=continues)
        texts = self._bounded(at_seams(rendered), kept)
        if len(texts) == 1:
            ids = self.tokenizer.encode(texts[0], add_special_tokens=False)
        else:
            ids = [token for text in texts for token in self.encoder.template(text)]
        laid = replace(lay_out_ids(ids, "".join(texts)), sets=fixed_sets(chat))
        if not find:
            return laid
        ranges = content_ranges(laid.text, [str(turn["content"]) for turn in said])
        return replace(laid, texts=token_ranges(self._offsets(texts), ranges))

    def _offsets(self, texts: Sequence[str]) -> list[tuple[int, int]]:
        """Return the characters of each token of a rendering, as first and last-plus-one."""
        if len(texts) == 1:
            found = self.tokenizer(texts[0], add_special_tokens=False, return_offsets_mapping=True)
            return list(found["offset_mapping"])
        starts = accumulate(map(len, texts), initial=0)
        return [
            (start + first, start + end)
            for text, start in zip(texts, starts, strict=False)
            for first, end in self.encoder.template_offsets(text)
        ]

    def _lay_out_pml(self, prompt: Prompt, policy: ReusePolicy, salt: str) -> PromptLayout:
        known = self.schemas.current(prompt.schema, salt)
        if known is None:
            message = f"schema '{prompt.schema}' is not known; add it with add_schema first"
            raise PMLError([Problem(Place(prompt.source), message, code="schema.unknown")])
        resolved = resolve(known.layout.schema, prompt, moves=policy.packed)
        laid = lay_out_prompt(resolved, known.layout, self.encoder, self.template, packed=policy.packed)
        # A schema that has been removed meanwhile counts as private.
        public = self.schemas.get(prompt.schema, PUBLIC) is known
        return replace(laid, place=prompt.place or Place(prompt.source), public=public)

    def _module_parts(
        self, layout: PromptLayout, schema: SchemaLayout, policy: ReusePolicy, salt: str, adapter: bytes
    ) -> tuple[PromptPart, ...]:
        owned = not layout.public
        known = self.schemas.known(schema, salt if owned else PUBLIC)
        specs = [self.schemas.specs(known, policy, made_with) for made_with in readable_adapters(policy, adapter)]

        def part_of(part: Placed) -> PromptPart:
            origin = part.origin
            if not isinstance(origin, TextRun | Hole):
                return PromptPart(part.ids, part.start, kept=part.kept)
            candidates = tuple(each.spec(origin, layout.imported) for each in specs)
            form = specs[0].form(origin, layout.imported)
            return PromptPart(part.ids, part.start, owned, candidates, encode=True, form=form, ttl_s=known.ttl_s)

        return tuple(map(part_of, layout.parts))

    def _opening_tokens(self, prompt: Any, layout: PromptLayout) -> int:
        """Return how many tokens at the end of a conversation open the answer; 0 for other prompts.

        In the next request, the template may write this answer without some of them, such as the opening of reasoning.
        """
        prompt = unwrap(prompt) if isinstance(prompt, Mapping) else prompt
        if not is_conversation(prompt):
            return 0
        given = prompt if isinstance(prompt, Conversation) else Conversation(prompt)
        if not given.options.generation or given.options.continues:
            return 0
        opening = self.encoder.template(self.template.told(given.options).opening(given, given.tools))
        ends = bool(opening) and layout.ids[-len(opening) :] == tuple(opening)
        return len(opening) if ends and len(opening) < len(layout.ids) else 0

    def _kept(self, params: SamplingParams) -> int | None:
        """Return how many tokens at the end of a prompt are kept; None for all."""
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        return max(1, self.model.max_positions - (1 if params.max_tokens is None else params.max_tokens))

    def _cut(self, layout: PromptLayout, most: int | None, params: SamplingParams) -> PromptLayout:
        """Keep the last ``most`` tokens of a prompt; None keeps all. Raises ParameterError."""
        if most is None or len(layout.ids) <= most:
            return layout
        if layout.schema is not None or any(part.origin is not None for part in layout.parts):
            raise ParameterError(
                f"truncate_prompt_tokens is {params.truncate_prompt_tokens}, and a prompt that reads modules or parts "
                "of messages is not cut; import fewer of them",
                code="prompt.not_cut",
            )
        kept = layout.ids[-most:]
        return lay_out_ids(kept, str(self.tokenizer.decode(list(kept))))


def _as_text(layout: PromptLayout) -> PromptLayout:
    """Return a prompt without a template: all of it is text."""
    return replace(layout, texts=((0, len(layout.ids)),))


def _computed_end(parts: tuple[PromptPart, ...]) -> tuple[PromptPart, ...]:
    """Compute the last part in place. A stored module has no state in front of its last token."""
    number = max((number for number, part in enumerate(parts) if part.ids), default=0)
    own = replace(parts[number], candidates=(), encode=False, form="", forms=())
    return (*parts[:number], own, *parts[number + 1 :])


def _marked_before(parts: tuple[PromptPart, ...], tokens: int) -> tuple[PromptPart, ...]:
    """Return the parts with a mark in front of the last ``tokens`` tokens, if the last part has more.

    A recurrent model keeps its state at the mark; see ``PromptPart.marked``.
    """
    last = parts[-1]
    if not tokens or last.candidates or len(last.ids) <= tokens:
        return parts
    at = len(last.ids) - tokens
    return (
        *parts[:-1],
        replace(last, ids=last.ids[:at], marked=True),
        replace(last, ids=last.ids[at:], start=last.start + at),
    )


def _apart(parts: tuple[PromptPart, ...], sets: Sequence[FreeSet], salt: str) -> tuple[PromptPart, ...]:
    """Mark parts as private from the first free set on, so that other salts cannot learn the order that was chosen.

    Module segments stay shared. ``Prefix`` isolates the text that is read in their place.
    """
    start = min((each.start for each in sets if not each.why_fixed), default=None)
    if start is None or not salt:
        return parts
    return tuple(part if part.candidates or part.start < start else replace(part, owned=True) for part in parts)
