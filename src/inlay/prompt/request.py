"""EngineRequest: the data that the prompt processors hand to the engine.

It is plain data with a versioned serialization. A segment's identity follows from its tokens, start, context and
scope. Only these are written. The reader computes digests and keys again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypedDict

from inlay.errors import ParameterError
from inlay.kv.identity import KeyMaker, SegmentSpec, fingerprint_under, specify
from inlay.policy import Recompute, ReusePolicy
from inlay.prompt.free_order import FreeSet, Member, check_sets, reordered, reordered_text
from inlay.sampling.params import SamplingParams
from inlay.types import EVERYONE, Scope

_VERSION = 10

#: The forms of modules: encoded with the others of their scaffold, or in an encoding context (policy.CONTEXTS).
#: "reanchored" is anchored behind an earlier version of the prompt's anchor. "moved" is text of an earlier request, as
#: it was computed behind other text.
FORMS = ("scaffold", "anchored", "isolated", "reanchored", "primed", "moved")


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of a prompt, and the segments that they may be read from.

    Attributes:
        start: the position of the first token in this prompt.
        owned: if True, they belong to the request, and their KV is stored for its salt alone.
        candidates: the segments that they may be read from, most exact first. Empty for the request's own text.
        encode: if True and no candidate is stored, the last lossless one is encoded. Otherwise tokens are computed in
            place.
        kept: if True, their KV may be stored and found later.
        form: the form of the candidates, one of FORMS; "" without candidates.
        ttl_s: the lifetime of the segment that they are read from, in seconds. None for no limit.
        marked: if True, later prompts may begin like this one up to its end. A recurrent model keeps its state there.
        forms: by context digest, the forms of candidates that differ from ``form``.
        found: True for unmarked text that an earlier prompt had, too (seen_pieces.py). Without ``encode``, its last
            lossless candidate is encoded in idle time if none is stored.
        copies: for text of a schema that is read from no segment, the names of its segments. Evicting one evicts
            the request's text as well.
    """

    ids: tuple[int, ...]
    start: int
    owned: bool = True
    candidates: tuple[SegmentSpec, ...] = ()
    encode: bool = False
    kept: bool = True
    form: str = ""
    ttl_s: float | None = None
    forms: tuple[tuple[bytes, str], ...] = ()
    marked: bool = False
    found: bool = False
    copies: tuple[bytes, ...] = ()

    def form_of(self, spec: SegmentSpec | None) -> str:
        """The form of a candidate, one of FORMS."""
        return self.form if spec is None or not self.forms else dict(self.forms).get(spec.lossless.digest, self.form)

    @property
    def open(self) -> bool:
        """True if the stored segments decide which candidate is read."""
        return len(self.candidates) > self.encode

    def segment(self, stored: Container[bytes]) -> SegmentSpec | None:
        """Return the segment that the part is read from. None if it is computed in place.

        Args:
            stored: the keys of the stored candidates.
        """
        if self.open:
            for spec in self.candidates:
                if spec.key in stored:
                    return spec
        return self.candidates[-1].lossless if self.encode else None

    def with_forms(self, forms: Callable[[SegmentSpec], Iterable[SegmentSpec]]) -> PromptPart:
        """Return this part with all forms of its candidates as candidates, most exact first.

        Args:
            forms: returns the forms of a segment.
        """
        return replace(self, candidates=tuple(form for spec in self.candidates for form in forms(spec)))


def kept_to(parts: Iterable[PromptPart], end: int) -> tuple[PromptPart, ...]:
    """Return the parts of a prompt so that no text at position ``end`` or behind is stored or looked up."""
    return tuple(
        part if part.start < end else replace(part, candidates=(), encode=False, kept=False, form="", forms=())
        for part in parts
    )


class RequestFields(TypedDict, total=False):
    """The fields of a request beside its prompt, parameters, policy and owner.

    Attributes:
        request_id: None for a random one.
        priority, deadline, forced: see EngineRequest.
        keep_marked_alone: if True, the text behind the last module or marked part is neither stored nor looked up.
        diagnostics: if True, the request's entry in the table of seen prompts makes its diagnostics.
    """

    request_id: str | None
    priority: int
    deadline: float | None
    forced: Sequence[int]
    keep_marked_alone: bool
    diagnostics: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A prompt with all data that the engine needs to answer it.

    Attributes:
        request_id: its name in events and messages. Unique among running requests.
        text: the prompt's text, for the answer's record. None if it was given as ids.
        ids, positions: of every token.
        parts: the same tokens, first to last, with the segments that they may be read from.
        fingerprint: of the model with the request's adapter. The candidates' keys are made with it.
        scope: its owner, and the name of its adapter.
        adapter: the adapter's digest. b"" for the model alone.
        priority: lower numbers are scheduled first.
        deadline: the time at which it ends, on the clock of ``time.perf_counter``. None for never.
        schema, schema_digest: the name of its schema, and a digest of its content. "" for none.
        forced: the tokens that the answer must have. Events report the model's prediction for each. Empty for a free
            answer.
        likely: segments that a later request may read, and this one does not.
        sets: its sets of members, in order of their position.
        diagnostics: True if the engine reports the source of each part.
        moves_text: True if its own text may be read as an earlier request computed it, behind other text.
    """

    request_id: str
    text: str | None
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    parts: tuple[PromptPart, ...]
    policy: ReusePolicy
    params: SamplingParams
    fingerprint: bytes
    scope: Scope = EVERYONE
    adapter: bytes = b""
    priority: int = 0
    deadline: float | None = None
    schema: str = ""
    schema_digest: str = ""
    forced: tuple[int, ...] = ()
    likely: tuple[SegmentSpec, ...] = ()
    sets: tuple[FreeSet, ...] = ()
    diagnostics: bool = False
    moves_text: bool = False

    @property
    def salt(self) -> str:
        """The cache salt. "" without one."""
        return self.scope.cache_salt

    @property
    def free_sets(self) -> list[FreeSet]:
        """The sets with a free order."""
        return [each for each in self.sets if not each.why_fixed]

    def ordered(self, orders: Sequence[Sequence[int]]) -> EngineRequest:
        """Return this request with the members of its free sets in these orders. An order is a list of member numbers.

        Raises:
            ParameterError: if an order is not a permutation of its set.
        """
        free = self.free_sets
        if len(orders) != len(free):
            raise ParameterError(
                f"there are {len(orders)} orders for {len(free)} sets; give one for each", code="request.invalid_order"
            )
        for each, order in zip(free, orders, strict=True):
            if sorted(order) != list(range(len(each.members))):
                raise ParameterError(
                    f"{list(order)} is no order of {len(each.members)} members; name each of them once",
                    code="request.invalid_order",
                )
        line = sorted(zip(free, orders, strict=True), key=lambda one: one[0].start)
        in_line, taken = [each for each, _ in line], [order for _, order in line]
        parts = reordered(self.parts, in_line, taken)
        text = None if self.text is None else reordered_text(self.text, in_line, taken)
        left = iter(orders)
        sets = tuple(
            each if each.why_fixed else replace(each, members=tuple(each.members[number] for number in next(left)))
            for each in self.sets
        )
        ids = tuple(token for part in parts for token in part.ids)
        return replace(self, parts=parts, ids=ids, text=text, sets=sets)

    def with_forms(self, forms: Callable[[SegmentSpec], Iterable[SegmentSpec]]) -> EngineRequest:
        """Return this request with all forms of its modules as candidates.

        Args:
            forms: returns the forms of a segment, most exact first.

        A policy that reads no modules has no candidates, so it reads no lossy form.
        """
        return replace(self, parts=tuple(part.with_forms(forms) if part.candidates else part for part in self.parts))

    def open_segments(self) -> list[SegmentSpec]:
        """The candidates of the open parts."""
        return [spec for part in self.parts if part.open for spec in part.candidates]

    def to_bytes(self) -> bytes:
        """UTF-8 JSON for ``from_bytes``."""
        segments = _Segments()
        parts = [
            [
                *(part.ids, part.start, part.owned),
                *([segments.number(spec) for spec in part.candidates], part.encode, part.kept, part.form),
            ]
            for part in self.parts
        ]
        likely = [segments.number(spec) for spec in self.likely]
        document = {
            "version": _VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "scope": asdict(self.scope),
            "policy": [str(self.policy), self.policy.positions],
            "unprofiled": None if self.policy.unprofiled is None else self.policy.unprofiled.amount,
            "params": _written_params(self.params),
            "fingerprint": self.fingerprint.hex(),
            "adapter": self.adapter.hex(),
            "forced": self.forced,
            "segments": segments.written,
            "parts": parts,
        }
        if likely:
            document["likely"] = likely
        if self.diagnostics:
            document["diagnostics"] = True
        if self.moves_text:
            document["moves_text"] = True
        if any(part.ttl_s is not None for part in self.parts):
            document["ttls"] = [None if part.ttl_s is None else str(part.ttl_s) for part in self.parts]
        if any(part.marked for part in self.parts):
            document["marked"] = [part.marked for part in self.parts]
        if any(part.found for part in self.parts):
            document["found"] = [part.found for part in self.parts]
        if any(part.copies for part in self.parts):
            document["copies"] = [[key.hex() for key in part.copies] for part in self.parts]
        if any(part.forms for part in self.parts):
            document["forms"] = [[(digest.hex(), form) for digest, form in part.forms] for part in self.parts]
        if self.sets:
            document["sets"] = [
                (
                    [(one.name, one.tokens, one.characters) for one in each.members],
                    *(each.start, each.text_start, each.why_fixed),
                )
                for each in self.sets
            ]
        return _as_bytes(document)

    @classmethod
    def from_bytes(cls, data: bytes, keys: KeyMaker) -> EngineRequest:
        """Parse the output of ``to_bytes``. keys: the key maker of its engine. Raises ParameterError."""
        with _reading(data, keys) as document:
            specs = _read_segments(document, keys)
            said = document.get("ttls") or [None] * len(document["parts"])
            ttls = [None if ttl is None else float(ttl) for ttl in said]
            marked = document.get("marked") or [False] * len(document["parts"])
            found = document.get("found") or [False] * len(document["parts"])
            copies = [
                tuple(map(bytes.fromhex, keys)) for keys in document.get("copies") or [()] * len(document["parts"])
            ]
            others = [
                tuple((bytes.fromhex(digest), form) for digest, form in forms)
                for forms in document.get("forms") or [()] * len(document["parts"])
            ]
            parts = tuple(
                PromptPart(
                    tuple(ids),
                    start,
                    owned,
                    tuple(specs[number] for number in candidates),
                    encode,
                    kept,
                    form,
                    ttl,
                    forms,
                    mark,
                    again,
                    keys,
                )
                for (ids, start, owned, candidates, encode, kept, form), ttl, forms, mark, again, keys in zip(
                    document["parts"], ttls, others, marked, found, copies, strict=True
                )
            )
            sets = tuple(
                FreeSet(tuple(Member(*one) for one in members), start, text_start, why_fixed)
                for members, start, text_start, why_fixed in document.get("sets", ())
            )
            check_sets(sets, [part.start for part in parts], max((p.start + len(p.ids) for p in parts), default=0))
            return cls(
                sets=sets,
                diagnostics=document.get("diagnostics", False) is True,
                moves_text=document.get("moves_text", False) is True,
                ids=tuple(token for part in parts for token in part.ids),
                positions=tuple(at for part in parts for at in range(part.start, part.start + len(part.ids))),
                parts=parts,
                policy=_policy(document["policy"], document.get("unprofiled")),
                params=_read_params(document["params"]),
                fingerprint=bytes.fromhex(document["fingerprint"]),
                adapter=bytes.fromhex(document["adapter"]),
                scope=Scope(**document["scope"]),
                forced=tuple(document["forced"]),
                likely=tuple(specs[number] for number in document.get("likely", ())),
                **{name: document[name] for name in _PLAIN},
            )


_PLAIN = ("request_id", "text", "priority", "deadline", "schema", "schema_digest")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodeRequest:
    """Segments to store for later prompts.

    Attributes:
        request_id: as in EngineRequest.
        name: the name in messages.
        specs: the segments to store. The text that they attend to may be left out.
        fingerprint, scope, adapter: see EngineRequest.
        ttl_s: their lifetime from the time of storing, in seconds. None for no limit.
        labels: for ``Engine.forget``: it also evicts all segments with any of these labels.
    """

    request_id: str
    name: str
    specs: tuple[SegmentSpec, ...]
    fingerprint: bytes
    scope: Scope = EVERYONE
    adapter: bytes = b""
    ttl_s: float | None = None
    labels: frozenset[bytes] = frozenset()

    @property
    def tokens(self) -> int:
        """The number of tokens to store."""
        return sum(len(spec.ids) for spec in self.specs)

    def to_bytes(self) -> bytes:
        """UTF-8 JSON for ``from_bytes``."""
        segments = _Segments()
        document = {
            "version": _VERSION,
            "request_id": self.request_id,
            "name": self.name,
            "scope": asdict(self.scope),
            "fingerprint": self.fingerprint.hex(),
            "adapter": self.adapter.hex(),
            "specs": [segments.number(spec) for spec in self.specs],
            "segments": segments.written,
            "ttl": None if self.ttl_s is None else str(self.ttl_s),
            "labels": sorted(label.hex() for label in self.labels),
        }
        return _as_bytes(document)

    @classmethod
    def from_bytes(cls, data: bytes, keys: KeyMaker) -> EncodeRequest:
        """Parse the output of ``to_bytes``. keys: the key maker of its engine. Raises ParameterError."""
        with _reading(data, keys) as document:
            specs = _read_segments(document, keys)
            return cls(
                specs=tuple(specs[number] for number in document["specs"]),
                ttl_s=None if document.get("ttl") is None else float(document["ttl"]),
                labels=frozenset(map(bytes.fromhex, document["labels"])),
                fingerprint=bytes.fromhex(document["fingerprint"]),
                scope=Scope(**document["scope"]),
                adapter=bytes.fromhex(document["adapter"]),
                request_id=document["request_id"],
                name=document["name"],
            )


def _policy(written: list[Any], unprofiled: float | None) -> ReusePolicy:
    """Parse a policy.

    Args:
        written: ``str(policy)``.
        unprofiled: how many first tokens of a module without a profile are recomputed. None for the default.
    """
    policy = ReusePolicy.parse(*written)
    return policy if unprofiled is None else replace(policy, unprofiled=Recompute("linked", unprofiled))


class _Segments:
    """Segments as rows: ids, start, row of the parent, True if it is private, True if it uses the request's adapter,
    labels.
    """

    def __init__(self) -> None:
        self.written: list[tuple[tuple[int, ...], int, int | None, bool, bool, list[str]]] = []
        self._numbers: dict[SegmentSpec, int] = {}

    def number(self, spec: SegmentSpec) -> int:
        """Return the row number of a segment. Adds it behind the segments that it attends to."""
        missing: list[SegmentSpec] = []
        at: SegmentSpec | None = spec
        while at is not None and at not in self._numbers:
            missing.append(at)
            at = at.parent
        for each in reversed(missing):
            parent = None if each.parent is None else self._numbers[each.parent]
            self._numbers[each] = len(self.written)
            labels = [label.hex() for label in each.labels]
            self.written.append((each.ids, each.start, parent, each.before.private, bool(each.before.adapter), labels))
        return self._numbers[spec]


def _read_segments(document: Mapping[str, Any], keys: KeyMaker) -> list[SegmentSpec]:
    specs: list[SegmentSpec] = []
    own = bytes.fromhex(document["adapter"])
    for ids, start, parent, private, adapted, labels in document["segments"]:
        context = () if parent is None else (specs[parent],)
        salt = document["scope"]["cache_salt"].encode() if private else b""
        adapter, named = own if adapted else b"", tuple(map(bytes.fromhex, labels))
        specs.append(specify(tuple(ids), start, context, keys, salt, adapter, named))
    return specs


@contextmanager
def _reading(data: bytes, keys: KeyMaker) -> Iterator[dict[str, Any]]:
    """The parsed document of a request for this model.

    Raises:
        ParameterError: for another model, and for any malformed field that the block meets.
    """
    document = _document(data)
    try:
        made_by = bytes.fromhex(document["fingerprint"])
        if made_by != fingerprint_under(keys.fingerprint, bytes.fromhex(document["adapter"])):
            raise ParameterError(
                "the request was prepared for another model; prepare it for this one", code="request.other_model"
            )
        yield document
    except ParameterError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ParameterError(
            f"the request is damaged ({type(error).__name__}: {error}); send it again", code="request.damaged"
        ) from error


def _as_bytes(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _document(data: bytes) -> dict[str, Any]:
    try:
        document: Any = json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"the request is no JSON ({error}); send it again", code="request.damaged") from error
    if not isinstance(document, dict):
        raise ParameterError("the request is no JSON object; send it again", code="request.damaged")
    version = document.get("version")
    if version != _VERSION:
        raise ParameterError(
            f"the request has version {version!r:.40}, and this inlay reads version {_VERSION}; run the same version "
            "of inlay on both sides",
            code="request.other_version",
        )
    return document


def _written_params(params: SamplingParams) -> dict[str, Any]:
    written = {field.name: getattr(params, field.name) for field in fields(params)}
    if params.logit_bias is not None:
        written["logit_bias"] = list(params.logit_bias.items())
    return {name: _plain(value) for name, value in written.items()}


def _read_params(written: Mapping[str, Any]) -> SamplingParams:
    bias = written["logit_bias"]
    return SamplingParams(**{**written, "logit_bias": None if bias is None else dict(bias)})


def _plain(value: Any) -> Any:
    """A value as JSON types, from any mappings and sequences."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
