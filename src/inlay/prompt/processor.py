"""The schemas that a model knows, and prompts turned into splices over them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from inlay.errors import ParameterError, Place, PMLError, Problem
from inlay.kv.identity import KeyMaker, SegmentSpec
from inlay.pml import Prompt, Schema, resolve
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.contexts import CONTEXTS, SchemaSpecs
from inlay.prompt.conversation import ContentSpecs, lay_out_conversation
from inlay.prompt.inputs import Conversation
from inlay.prompt.layout import Hole, SchemaLayout, TextRun, lay_out_schema
from inlay.prompt.placement import ContentPart, Placed, PromptLayout, lay_out_ids, lay_out_prompt
from inlay.prompt.splice import Splice, open_end, splice_exact, splice_fresh, splice_modules
from inlay.prompt.tokens import TextEncoder, at_seams

_Name = tuple[str, str]  # a schema's: the salt of those who know it ("" for a public one), and its own


@dataclass(frozen=True)
class Policy:
    """How a request is placed, how much approximation it accepts, and whose it is.

    salt: what keeps the KV of its own text, and of private schemas, from requests with another salt; "" for none.
    """

    reuse: str
    positions: str
    salt: str = ""

    @property
    def secret(self) -> bytes:
        """The salt as it goes into digests."""
        return self.salt.encode()


@dataclass
class Library:
    """Schemas by name, public ones and those that only requests with some salt know.

    Any thread may ask. Layouts and specs never change once they are made: they are made without a lock, and only what
    names them is kept under one.

    why_not_shift: the reason why this model's segments cannot be read at a shift, or None.
    placeholder: the token that fills holes while modules are encoded, or None.
    vocabulary: how many tokens the model knows.
    """

    encoder: TextEncoder
    template: ChatTemplate
    keys: KeyMaker
    why_not_shift: str | None
    placeholder: int | None
    vocabulary: int
    _layouts: dict[_Name, SchemaLayout] = field(default_factory=dict)
    _specs: dict[tuple[_Name, str, str], SchemaSpecs] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of changes to these two

    def lay_out(self, schema: Schema, salt: str = "") -> SchemaLayout:
        """A schema's layout, that of ``add`` if there is one. Changes nothing. Raises PMLError."""
        known = self._layouts.get((salt, schema.name))
        if known is not None and known.schema is schema:
            return known
        return lay_out_schema(schema, self.encoder, self.template, vocabulary=self.vocabulary)

    def add(self, layout: SchemaLayout, salt: str = "") -> None:
        """Keep a schema under its name, in place of one that had that name."""
        name = (salt, layout.schema.name)
        with self._lock:
            if self._layouts.get(name) is not layout:
                self._forget(name)
                self._layouts[name] = layout

    def remove(self, name: str, salt: str = "") -> bool:
        """Forget a schema. Returns whether there was one."""
        with self._lock:
            return self._forget((salt, name))

    def _forget(self, name: _Name) -> bool:
        self._specs = {key: specs for key, specs in self._specs.items() if key[0] != name}
        return self._layouts.pop(name, None) is not None

    def layout(self, name: str, salt: str = "") -> SchemaLayout | None:
        """The layout of the schema of that name: the salt's own, else the public one."""
        return self._layouts.get((salt, name)) or self._layouts.get(("", name))

    def policy(self, reuse: str, positions: str | None, salt: str = "") -> Policy:
        """Settle the positions of a policy. Raises ParameterError where the model cannot do what is asked."""
        modular = reuse in CONTEXTS
        if modular and positions == "packed" and self.why_not_shift is not None:
            raise ParameterError(
                f"positions 'packed' with reuse '{reuse}' reads segments at a shift, which this model does not allow: "
                f"{self.why_not_shift}; use positions 'schema'"
            )
        default = "schema" if modular and self.why_not_shift is not None else "packed"
        return Policy(reuse, positions or default, salt)

    def chat(self, messages: Sequence[Mapping[str, Any]], encode: Callable[[str], list[int]]) -> PromptLayout:
        """Chat messages as the template writes them, without a schema. encode: the tokenizer's own, for whole texts.

        The ids are those of the whole rendering, unless a message comes in parts, which are encoded apart, or a text
        spells a special token: then the rendering is cut there, so that no text can open a role.
        """
        self.encoder.bound.check_count(len(messages), "messages")
        tools = messages.tools if isinstance(messages, Conversation) else None
        if not all(isinstance(message["content"], str) for message in messages):
            return lay_out_conversation(messages, self.encoder, self.template, tools)
        texts = at_seams(self.template.render_with_seams(messages, tools=tools))
        self.encoder.bound.check(texts)
        if len(texts) == 1:
            return lay_out_ids(encode(texts[0]), texts[0])
        return lay_out_ids([token for text in texts for token in self.encoder.template(text)], "".join(texts))

    def place(self, prompt: Prompt, policy: Policy) -> PromptLayout:
        """Token ids and positions of a prompt. Raises PMLError."""
        layout = self.layout(prompt.schema, policy.salt)
        if layout is None:
            message = f"schema '{prompt.schema}' is not known; add it with add_schema first"
            raise PMLError([Problem(Place(prompt.source), message)])
        packed = policy.positions == "packed"
        resolved = resolve(layout.schema, prompt, moves=packed)
        laid = lay_out_prompt(resolved, layout, self.encoder, self.template, positions=policy.positions)
        return replace(laid, place=prompt.place or Place(prompt.source), public=self._is_public(layout))

    def content(self, prompt: PromptLayout, policy: Policy) -> ContentSpecs | None:
        """The specs of a conversation's parts, where it has any and the policy allows them."""
        if policy.reuse not in CONTEXTS or not any(isinstance(part.origin, ContentPart) for part in prompt.parts):
            return None
        movable = self.why_not_shift is None
        return ContentSpecs(prompt, context=policy.reuse, movable=movable, keys=self.keys, salt=policy.secret)

    def splice(
        self,
        prompt: PromptLayout,
        policy: Policy,
        content: ContentSpecs | None = None,
        stored: Container[bytes] = (),
    ) -> Splice:
        """What a placed prompt attends to, with at least one fresh token at its end.

        content: that of the prompt, where it is known already. stored: the keys of what is stored of it.
        """
        salt, public = policy.secret, prompt.public
        if policy.reuse == "off":
            return splice_fresh(prompt.parts)
        if policy.reuse in CONTEXTS and prompt.schema is not None:
            specs = self.specs(prompt.schema, policy, public=public)
            spec_of = partial(_schema_spec, specs, prompt.imported)
            return open_end(splice_modules(prompt.parts, spec_of, salt=salt, public=public))
        content = content or self.content(prompt, policy)
        if content is None:
            return splice_exact(prompt.parts, salt=salt, public=public)
        spec_of = partial(content.spec, stored=stored)
        return open_end(splice_modules(content.parts(), spec_of, salt=salt, public=False))

    def all_specs(self, layout: SchemaLayout, policy: Policy) -> list[SegmentSpec]:
        """Every segment of a schema that can be encoded before a prompt asks for it."""
        return [spec for specs in self.module_specs(layout, policy).values() for spec in specs]

    def module_specs(self, layout: SchemaLayout, policy: Policy) -> dict[str, list[SegmentSpec]]:
        """The same by module; "" for text outside modules."""
        if policy.reuse not in CONTEXTS:
            return {}
        return self.specs(layout, policy, public=self._is_public(layout)).by_module()

    def specs(self, layout: SchemaLayout, policy: Policy, *, public: bool) -> SchemaSpecs:
        """The specs of a schema under a modular policy. public: whether it is everybody's, or the policy's salt's."""
        name = ("" if public else policy.salt, layout.schema.name)
        memo = (name, policy.reuse, policy.positions)
        known = self._specs.get(memo)
        if known is not None and known.layout is layout:
            return known
        made = SchemaSpecs(
            layout,
            context=policy.reuse,
            packed=policy.positions == "packed",
            movable=self.why_not_shift is None,
            keys=self.keys,
            unk_id=self.placeholder,
            salt=b"" if public else policy.secret,
        )
        with self._lock:
            if self._layouts.get(name) is not layout:
                return made  # of one that has been forgotten meanwhile: for this request alone
            return self._specs.setdefault(memo, made)

    def _is_public(self, layout: SchemaLayout) -> bool:
        """Not of one that has been forgotten meanwhile: what is in doubt is private."""
        return self._layouts.get(("", layout.schema.name)) is layout


def _schema_spec(specs: SchemaSpecs, imported: frozenset[str], part: Placed) -> SegmentSpec | None:
    return specs.spec(part.origin, imported) if isinstance(part.origin, TextRun | Hole) else None


def check_lengths(layout: SchemaLayout, longest: int) -> None:
    """Refuse what no prompt can hold. longest: the model's context, in tokens. Raises PMLError."""
    tokens: dict[str, int] = {}
    for run in layout.runs:
        name = run.owner[-1] if run.owner else ""
        tokens[name] = tokens.get(name, 0) + len(run.ids)
    problems = []
    for name, count in tokens.items():
        place = layout.schema.modules[name].place if name else Place(layout.schema.source)
        what = f"module '{name}'" if name else "the text outside modules"
        if count >= longest:
            message = (
                f"{what} is {count} tokens long and the model's context is {longest} tokens long, answer included; "
                "shorten it, or cut it into modules of which prompts import some"
            )
            problems.append(Problem(place, message))
    if problems:
        raise PMLError(problems)
