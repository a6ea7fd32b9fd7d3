"""The schemas that a model knows, and prompts turned into splices over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from inlay.cache.contexts import CONTEXTS, SchemaSpecs
from inlay.cache.segment import KeyMaker, SegmentSpec
from inlay.cache.splice import Splice, open_end, splice_exact, splice_fresh, splice_modules
from inlay.chat import ChatTemplate
from inlay.errors import ParameterError, Place, PMLError, Problem
from inlay.layout import SchemaLayout, lay_out_schema
from inlay.placement import PromptLayout, lay_out_ids, lay_out_prompt
from inlay.pml import Prompt, Schema, resolve
from inlay.tokens import TextEncoder


@dataclass(frozen=True)
class Policy:
    """How a request is placed and how much approximation it accepts."""

    reuse: str
    positions: str


@dataclass
class Library:
    """Schemas by name.

    why_not_shift: the reason why this model's segments cannot be read at a shift, or None.
    placeholder: the token that fills holes while modules are encoded, or None.
    special_tokens: the texts that the tokenizer takes for special tokens.
    """

    encoder: TextEncoder
    template: ChatTemplate
    keys: KeyMaker
    why_not_shift: str | None
    placeholder: int | None
    special_tokens: frozenset[str]
    _layouts: dict[str, SchemaLayout] = field(default_factory=dict)
    _specs: dict[tuple[str, Policy], SchemaSpecs] = field(default_factory=dict)

    def add(self, schema: Schema) -> SchemaLayout:
        """Lay a schema out and keep it under its name, in place of one that had that name. Raises PMLError."""
        known = self._layouts.get(schema.name)
        if known is None or known.schema is not schema:
            self._layouts[schema.name] = lay_out_schema(schema, self.encoder, self.template)
            self._specs = {key: specs for key, specs in self._specs.items() if key[0] != schema.name}
        return self._layouts[schema.name]

    def layout(self, name: str) -> SchemaLayout | None:
        """The layout of the schema of that name, if it was added."""
        return self._layouts.get(name)

    def policy(self, reuse: str, positions: str | None) -> Policy:
        """Settle the positions of a policy. Raises ParameterError where the model cannot do what is asked."""
        modular = reuse in CONTEXTS
        if modular and positions == "packed" and self.why_not_shift is not None:
            raise ParameterError(
                f"positions 'packed' with reuse '{reuse}' reads segments at a shift, which this model does not allow: "
                f"{self.why_not_shift}; use positions 'schema'"
            )
        default = "schema" if modular and self.why_not_shift is not None else "packed"
        return Policy(reuse, positions or default)

    def chat(self, messages: Sequence[Mapping[str, str]], encode: Callable[[str], list[int]]) -> PromptLayout:
        """Chat messages as the template writes them, without a schema. encode: the tokenizer's own, for whole texts.

        The ids are those of the whole rendering, unless a message spells a special token: then bodies are encoded
        apart, so that no message can open a role.
        """
        text = self.template.render(messages)
        bodies = [message["content"] for message in messages]
        if not any(name in body for name in self.special_tokens for body in bodies):
            return lay_out_ids(encode(text), text)
        roles = [message["role"] for message in messages]
        pieces = self.template.pieces(roles, generation=True)
        trims = self.template.trims(roles, generation=True)
        ids = list(self.encoder.template(pieces[0]))
        for body, trim, piece in zip(bodies, trims, pieces[1:], strict=True):
            ids += self.encoder.text(trim.start(trim.end(body)))
            ids += self.encoder.template(piece)
        return lay_out_ids(ids, text)

    def place(self, prompt: Prompt, policy: Policy) -> PromptLayout:
        """Token ids and positions of a prompt. Raises PMLError."""
        layout = self._layouts.get(prompt.schema)
        if layout is None:
            message = f"schema '{prompt.schema}' is not known; add it with add_schema first"
            raise PMLError([Problem(Place(prompt.source), message)])
        packed = policy.positions == "packed"
        resolved = resolve(layout.schema, prompt, moves=packed)
        laid = lay_out_prompt(resolved, layout, self.encoder, self.template, positions=policy.positions)
        return replace(laid, place=prompt.place or Place(prompt.source))

    def splice(self, prompt: PromptLayout, policy: Policy) -> Splice:
        """What a placed prompt attends to, with at least one fresh token at its end."""
        if policy.reuse == "off":
            return splice_fresh(prompt.parts)
        if policy.reuse == "exact":
            return splice_exact(prompt.parts)
        if prompt.schema is None:
            return splice_exact(prompt.parts)
        specs = self.specs(prompt.schema, policy)
        return open_end(splice_modules(prompt.parts, lambda origin: specs.spec(origin, prompt.imported)))

    def all_specs(self, layout: SchemaLayout, policy: Policy) -> list[SegmentSpec]:
        """Every segment of a schema that can be encoded before a prompt asks for it."""
        return self.specs(layout, policy).all() if policy.reuse in CONTEXTS else []

    def specs(self, layout: SchemaLayout, policy: Policy) -> SchemaSpecs:
        """The specs of a schema under a modular policy."""
        memo = (layout.schema.name, policy)
        if memo not in self._specs:
            self._specs[memo] = SchemaSpecs(
                layout,
                context=policy.reuse,
                packed=policy.positions == "packed",
                movable=self.why_not_shift is None,
                keys=self.keys,
                unk_id=self.placeholder,
            )
        return self._specs[memo]
