"""The schemas that prompts of one model may name, with their layouts and segment specs.

An owner's own schema hides the public one of the same name.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from inlay.errors import ModelError, ParameterError
from inlay.kv.identity import SegmentSpec, labels_of
from inlay.pml import Prompt, PromptBuilder, Schema, Union
from inlay.policy import ReusePolicy
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.contexts import SchemaSpecs, placeholder_id
from inlay.prompt.layout import Hole, SchemaLayout, TextRun, lay_out_schema
from inlay.prompt.model_info import ModelInfo
from inlay.prompt.placement import PromptLayout
from inlay.prompt.primer import PRIMER
from inlay.prompt.tokens import TextEncoder, beyond_vocabulary
from inlay.prompt.turns import openings
from inlay.types import EVERYONE, Scope

T = TypeVar("T")

PUBLIC = ""  # the owner of public schemas


class SchemaRegistry(Generic[T]):
    """Schemas, or data about them, by name and owner (a cache_salt). Thread-safe.

    A name is unique among the public schemas, and among those of each owner.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], T] = {}
        self._lock = threading.Lock()  # for changes

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._known.values()))

    def find(self, name: str, owner: str = PUBLIC) -> T | None:
        """Return the owner's own entry of a name, else the public one."""
        own = self._known.get((owner, name))
        return self._known.get((PUBLIC, name)) if own is None else own

    def get(self, name: str, owner: str = PUBLIC) -> T | None:
        """Return exactly this owner's entry of a name."""
        return self._known.get((owner, name))

    def of(self, owner: str) -> list[T]:
        """Return all entries of an owner."""
        return [known for (whose, _), known in list(self._known.items()) if whose == owner]

    def visible(self, owner: str) -> dict[str, T]:
        """Return name → entry for all names that an owner can use."""
        known = list(self._known.items())
        return {name: one for whose in (PUBLIC, owner) for (of, name), one in known if of == whose}

    def put(self, name: str, owner: str, known: T) -> None:
        """Register an entry, in place of one with the same name and owner."""
        with self._lock:
            self._known[owner, name] = known

    def remove(self, name: str, owner: str = PUBLIC) -> T | None:
        """Remove and return an entry; None without one."""
        with self._lock:
            return self._known.pop((owner, name), None)


_PRIMER_SHARE = 8  # a primer takes at most this part of the context: one eighth
_PRIMER_ROOM = 4  # a pool that holds fewer primers than this encodes without one
_COPIED = ReusePolicy.parse("modular")
_MOST_LIKELY = 64  # segments that a request names as likely to be read next


@dataclass(eq=False, slots=True)
class KnownSchema:
    """A schema with its layout, its owner (a cache_salt), and its specs by policy and adapter.

    ``ttl_s`` is the lifetime in seconds of its segments since the last read; None for no limit. Layouts and specs are
    immutable, so they are made without a lock.
    """

    layout: SchemaLayout
    owner: str
    ttl_s: float | None = None
    specs: dict[tuple[ReusePolicy, bytes], SchemaSpecs] = field(default_factory=dict)
    copies: dict[int, tuple[bytes, ...]] = field(default_factory=dict)  # by index of the entry


class KnownSchemas(SchemaRegistry[KnownSchema]):
    """All schemas that prompts of one model may name. Thread-safe.

    ``placeholders`` is the filling of holes while modules are encoded, "none" or "unk". Raises ModelError.
    """

    def __init__(self, model: ModelInfo, encoder: TextEncoder, template: ChatTemplate, placeholders: str) -> None:
        super().__init__()
        self._model = model
        self._encoder = encoder
        self._template = template
        self._adding = threading.Lock()
        self._primer = encoder.text(PRIMER)[: model.max_positions // _PRIMER_SHARE]
        self._placeholder = placeholder_id(placeholders, encoder.unk_id)
        if self._placeholder is not None:
            unknown = beyond_vocabulary((self._placeholder,), model.vocab_size, encoder.name)
            if unknown:
                raise ModelError(f"placeholders='unk' fills holes with {unknown}", code="model.unknown_token")

    def lay_out(self, schema: Schema, owner: str = PUBLIC) -> SchemaLayout:
        """Return a schema's layout, the registered one if there is one. Registers nothing. Raises PMLError."""
        known = self.get(schema.name, owner)
        if known is not None and known.layout.schema is schema:
            return known.layout
        return lay_out_schema(schema, self._encoder, self._template, vocabulary=self._model.vocab_size)

    def add(self, layout: SchemaLayout, owner: str = PUBLIC, ttl_s: float | None = None) -> None:
        """Register a schema, in place of one with the same name. For ``ttl_s`` see KnownSchema."""
        name = layout.schema.name
        with self._adding:
            known = self.get(name, owner)
            if known is None or known.layout is not layout:
                self.put(name, owner, KnownSchema(layout, owner, ttl_s))
            else:
                known.ttl_s = ttl_s
        if self._template.tells_time and layout.schema.has_turns:
            self._template.warn_once(
                "the chat template writes today's date in front of a schema's text, so that text and the modules that "
                "were encoded behind it are recomputed on the next day: set template_date, or use reuse='isolated'"
            )

    def layout(self, name: str, salt: str = "") -> SchemaLayout | None:
        """Return the layout of the schema that this name means for requests with this salt."""
        known = self.find(name, salt)
        return None if known is None else known.layout

    def schema_of(self, prompt: Any, salt: str = "") -> tuple[str, str]:
        """Return the name of a prompt's schema, and its digest for this salt; "" for none."""
        if not isinstance(prompt, (Prompt, PromptBuilder)):
            return "", ""
        layout = self.layout(prompt.schema, salt)
        return prompt.schema, "" if layout is None else layout.digest

    def module_specs(self, name: str, policy: ReusePolicy, scope: Scope = EVERYONE) -> dict[str, list[SegmentSpec]]:
        """Return all segments of a schema that can be encoded ahead, by module; "" stands for text outside modules.

        Empty under a policy without modules. Raises ParameterError for an unknown schema.
        """
        known = self._named(name, scope)
        return self._encoded(known, policy, self._model.adapter(scope.adapter)).by_module() if policy.modular else {}

    def every_spec(
        self, name: str, policy: ReusePolicy, scope: Scope = EVERYONE, modules: Sequence[str] = ()
    ) -> list[SegmentSpec]:
        """Return the segments of some modules of a schema, or of all, under this policy and all policies used so far.

        With the text outside modules, named "", come the primers that modules are encoded behind. A policy without
        modules gives the segments whose keys its text has (``copies``).

        Raises ParameterError for an unknown schema or module.
        """
        known = self._named(name, scope)
        check_modules(known.layout, modules)
        if policy.modular:
            self._encoded(known, policy, self._model.adapter(scope.adapter))
        else:
            self._copied(known)
        used = list(known.specs.values())
        found = {
            spec.key: spec
            for each in used
            for module, specs in each.every().items()
            if not modules or module in modules
            for spec in specs
        }
        if not modules or "" in modules:
            found |= {spec.key: spec for specs in used for spec in specs.primers()}
        return list(found.values())

    def labels(self, name: str, scope: Scope = EVERYONE, modules: Sequence[str] = ()) -> frozenset[bytes]:
        """Return the labels of a schema, or of some of its modules. Raises ParameterError for an unknown schema."""
        owner = self._named(name, scope).owner.encode()
        if not modules:
            return frozenset(labels_of(owner, name)[:1])
        return frozenset(labels_of(owner, name, module)[1] for module in modules)

    def all_specs(self, layout: SchemaLayout, policy: ReusePolicy, scope: Scope = EVERYONE) -> list[SegmentSpec]:
        """Return all segments of a schema that is, or just was, registered for a salt."""
        made_with, known = self._model.adapter(scope.adapter), self.known(layout, scope.cache_salt)
        modules = self._encoded(known, policy, made_with).by_module() if policy.modular else {}
        return [spec for specs in modules.values() for spec in specs]

    def siblings(self, layout: PromptLayout, policy: ReusePolicy, salt: str, adapter: bytes) -> tuple[SegmentSpec, ...]:
        """Return the segments of the unions' other members, which a prompt could have imported instead."""
        if not policy.modular or layout.schema is None or not layout.imported:
            return ()
        known = self.known(layout.schema, salt if not layout.public else PUBLIC)
        beside = _siblings(layout.schema.schema, layout.imported)
        if not beside:
            return ()
        modules = self._encoded(known, policy, adapter).by_module()
        return tuple(spec for module in beside for spec in modules.get(module, ()))[:_MOST_LIKELY]

    def current(self, name: str, salt: str = "") -> KnownSchema | None:
        """Return a schema, laid out again if its chat template tells the time and now writes another text."""
        known = self.find(name, salt)
        if known is None or openings(self._template, known.layout.schema) == known.layout.openings:
            return known
        fresh = lay_out_schema(known.layout.schema, self._encoder, self._template, vocabulary=self._model.vocab_size)
        with self._adding:
            if self.get(fresh.schema.name, known.owner) is known:
                known = KnownSchema(fresh, known.owner, known.ttl_s)
                self.put(fresh.schema.name, known.owner, known)
        return known

    def known(self, layout: SchemaLayout, owner: str) -> KnownSchema:
        """Return the entry of a schema, or one for this request alone if the schema has been removed meanwhile."""
        known = self.get(layout.schema.name, owner)
        return known if known is not None and known.layout is layout else KnownSchema(layout, owner)

    def primer(self, policy: ReusePolicy) -> tuple[int, ...]:
        """Return the primer's tokens under a policy; empty for none.

        A primer needs segments that are read shifted, and a pool with room for it beside the modules.
        """
        pool = self._model.pool_tokens
        fits = pool is None or len(self._primer) * _PRIMER_ROOM <= pool
        return self._primer if policy.primed and fits and self._model.why_not_shift is None else ()

    def is_primer(self, spec: SegmentSpec) -> bool:
        """True if a segment holds the primer. Modules are encoded behind it, and no prompt reads it."""
        return spec.ids == self._primer

    def copies(self, known: KnownSchema, entry: TextRun | Hole) -> tuple[bytes, ...]:
        """Return the names of a schema's text where it is read from no segment; see PromptPart.

        They are those of its segment under the default policy, without an adapter.
        """
        found = known.copies.get(entry.index)
        if found is None:
            found = known.copies[entry.index] = self._copied(known).spec(entry, frozenset()).names
        return found

    def _copied(self, known: KnownSchema) -> SchemaSpecs:
        return self.specs(known, _COPIED, b"")

    def _named(self, name: str, scope: Scope) -> KnownSchema:
        known = self.find(name, scope.cache_salt)
        if known is None:
            raise ParameterError(f"schema '{name}' is not known; add it with add_schema first", code="schema.unknown")
        return known

    def _encoded(self, known: KnownSchema, policy: ReusePolicy, adapter: bytes) -> SchemaSpecs:
        """Return the specs that are encoded if nothing of a schema is stored."""
        return self.specs(known, policy, readable_adapters(policy, adapter)[-1])

    def specs(self, known: KnownSchema, policy: ReusePolicy, adapter: bytes) -> SchemaSpecs:
        """Return the specs of a schema under a modular policy and an adapter."""
        policy = policy.without_recompute()
        made = known.specs.get((policy, adapter))
        if made is not None:
            return made
        made = SchemaSpecs(
            known.layout,
            anchored=policy.anchored,
            packed=policy.packed,
            movable=self._model.why_not_shift is None,
            keys=self._model.keys,
            unk_id=self._placeholder,
            salt=known.owner.encode(),
            adapter=adapter,
            primer=self.primer(policy),
            longest=self._model.max_positions,
        )
        return known.specs.setdefault((policy, adapter), made)


def check_modules(layout: SchemaLayout, modules: Iterable[str]) -> None:
    """Raise ParameterError for a module that a schema does not have. "" stands for its text outside modules."""
    for module in modules:
        if module and module not in layout.schema.modules:
            raise ParameterError(
                f"schema '{layout.schema.name}' has no module '{module}'; give the path of one, like 'plan/miami'",
                code="schema.unknown_module",
            )


def readable_adapters(policy: ReusePolicy, adapter: bytes) -> tuple[bytes, ...]:
    """Return the adapters of segments that a request may read, most exact first."""
    return (adapter, b"") if adapter and policy.across_adapters else (adapter,)


def _siblings(schema: Schema, imported: Container[str]) -> list[str]:
    """Return the paths of modules that share a union with an imported one and are not imported."""
    found: list[str] = []
    todo: list[Any] = list(schema.children)
    while todo:
        node = todo.pop()
        if isinstance(node, Union):
            paths = [schema.paths[member.order] for member in node.members]
            if any(path in imported for path in paths):
                found += [path for path in paths if path not in imported]
        todo += node.members if isinstance(node, Union) else getattr(node, "children", ())
    return found
