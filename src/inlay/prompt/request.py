"""EngineRequest: what crosses the border between those who prepare prompts and the engine that answers them.

It is plain data, and has a versioned form in bytes. What a segment is follows from its tokens, where they start, what
stands before them and whose they are; so that is written, and digests and keys are worked out again by who reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from inlay.errors import ParameterError
from inlay.kv.identity import KeyMaker, SegmentSpec, fingerprint_under, specify
from inlay.policy import ReusePolicy
from inlay.prompt.free_order import FreeSet, Member, check_sets, reordered, reordered_text
from inlay.recompute import Recompute
from inlay.sampling.params import SamplingParams

_VERSION = 7

#: What modules are encoded as: with the others of their scaffold, or as an encoding context has it (policy.CONTEXTS).
#: "reanchored" is anchored behind an earlier version of the prompt's anchor.
FORMS = ("scaffold", "anchored", "isolated", "reanchored")


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of a prompt, and the segments that they may be read from.

    start: the position of the first one in this prompt.
    owned: whether they are the request's own, so that what is computed of them is kept for its salt alone.
    candidates: the segments that they may be read from, most exact first; none for text of the request's own.
    encode: whether the last lossless one is encoded where none is stored; else tokens are computed where they stand.
    kept: whether what is computed of them may be kept, and found.
    form: what the candidates are encoded as, a word of FORMS; "" where there are none.
    ttl_s: for how many seconds the segment that they are read from is to be found from then on; None for as long as
        there is room.
    forms: the forms of candidates that have another one, by their context digests.
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

    def form_of(self, spec: SegmentSpec | None) -> str:
        """What a candidate is encoded as, a word of FORMS."""
        return self.form if spec is None or not self.forms else dict(self.forms).get(spec.lossless.digest, self.form)

    @property
    def open(self) -> bool:
        """Whether what it is read from depends on what is stored."""
        return len(self.candidates) > self.encode

    def segment(self, stored: Container[bytes]) -> SegmentSpec | None:
        """What it is read from, or None for what is computed where it stands. stored: the keys of candidates."""
        if self.open:
            for spec in self.candidates:
                if spec.key in stored:
                    return spec
        return self.candidates[-1].lossless if self.encode else None

    def with_forms(self, forms: Callable[[SegmentSpec], Iterable[SegmentSpec]]) -> PromptPart:
        """This part where lossy forms of a candidate may be read in its place, but for one that is more exact."""
        return replace(self, candidates=tuple(form for spec in self.candidates for form in forms(spec)))


def kept_to(parts: Iterable[PromptPart], end: int) -> tuple[PromptPart, ...]:
    """Parts of a prompt, of which what stands at position ``end`` or behind is neither kept nor found."""
    return tuple(
        part if part.start < end else replace(part, candidates=(), encode=False, kept=False, form="", forms=())
        for part in parts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A prompt with all that an engine has to know to answer it.

    request_id: what events and messages call it; no other request under way has it.
    text: what the prompt was made of, for its answer's record; None where it was given as ids.
    ids, positions: of every token. parts: the same, as what it is read from; from first to last.
    fingerprint: of the model whose keys the candidates have, with the request's adapter. adapter: its digest; b"" for
        the model alone. salt: whose the request is; "" for nobody's.
    priority: who goes first; a lower number does. tenant, weight: who shares the passes, and in which proportion.
    deadline: when it ends in any case, on the clock of ``time.perf_counter``; None for never.
    schema, schema_digest: the name of its schema, and what tells that from others of this name; "" for none.
    forced: the tokens that the answer has to say, of each of which events tell what the model expected; none for an
        answer of the model's own.
    likely: segments that a request to come may read, and this one does not.
    sets: members of it that change places; in the order in which they stand.
    """

    request_id: str
    text: str | None
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    parts: tuple[PromptPart, ...]
    policy: ReusePolicy
    params: SamplingParams
    fingerprint: bytes
    adapter: bytes = b""
    salt: str = ""
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    deadline: float | None = None
    schema: str = ""
    schema_digest: str = ""
    forced: tuple[int, ...] = ()
    likely: tuple[SegmentSpec, ...] = ()
    sets: tuple[FreeSet, ...] = ()

    @property
    def free_sets(self) -> list[FreeSet]:
        """Those of its sets whose order is free."""
        return [each for each in self.sets if not each.why_fixed]

    def ordered(self, orders: Sequence[Sequence[int]]) -> EngineRequest:
        """This request with the members of its free sets in these orders: of each set, the numbers of its members.

        Raises ParameterError for what is no order of them.
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
        """This request, each of whose modules may be read in these forms. forms: of a segment, most exact first.

        A policy that reads no modules has no candidates, and so reads no lossy form of any.
        """
        return replace(self, parts=tuple(part.with_forms(forms) if part.candidates else part for part in self.parts))

    def open_segments(self) -> list[SegmentSpec]:
        """The candidates of those parts that are read from what is stored of them."""
        return [spec for part in self.parts if part.open for spec in part.candidates]

    def to_bytes(self) -> bytes:
        """JSON, in UTF-8, that ``from_bytes`` reads."""
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
        if any(part.ttl_s is not None for part in self.parts):
            document["ttls"] = [None if part.ttl_s is None else str(part.ttl_s) for part in self.parts]
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
        """Read what ``to_bytes`` wrote. keys: of the engine that is to answer it. Raises ParameterError."""
        with _reading(data, keys) as document:
            specs = _read_segments(document, keys)
            said = document.get("ttls") or [None] * len(document["parts"])
            ttls = [None if ttl is None else float(ttl) for ttl in said]
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
                )
                for (ids, start, owned, candidates, encode, kept, form), ttl, forms in zip(
                    document["parts"], ttls, others, strict=True
                )
            )
            sets = tuple(
                FreeSet(tuple(Member(*one) for one in members), start, text_start, why_fixed)
                for members, start, text_start, why_fixed in document.get("sets", ())
            )
            check_sets(sets, [part.start for part in parts], max((p.start + len(p.ids) for p in parts), default=0))
            return cls(
                sets=sets,
                ids=tuple(token for part in parts for token in part.ids),
                positions=tuple(at for part in parts for at in range(part.start, part.start + len(part.ids))),
                parts=parts,
                policy=_policy(document["policy"], document.get("unprofiled")),
                params=_read_params(document["params"]),
                fingerprint=bytes.fromhex(document["fingerprint"]),
                adapter=bytes.fromhex(document["adapter"]),
                forced=tuple(document["forced"]),
                likely=tuple(specs[number] for number in document.get("likely", ())),
                **{name: document[name] for name in _PLAIN},
            )


_PLAIN = (
    *("request_id", "text", "salt", "tenant", "weight", "priority", "deadline"),
    *("schema", "schema_digest"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodeRequest:
    """Segments that are to be stored, for prompts to come.

    request_id: as of an EngineRequest. name: what messages call it. specs: what is to be stored; the text that they
    attend to may be left out. fingerprint, adapter, salt, tenant, weight: see EngineRequest.
    ttl_s: for how many seconds they are to be found from when they are stored; None for as long as there is room.
    """

    request_id: str
    name: str
    specs: tuple[SegmentSpec, ...]
    fingerprint: bytes
    adapter: bytes = b""
    salt: str = ""
    tenant: str = ""
    weight: float = 1.0
    ttl_s: float | None = None

    @property
    def tokens(self) -> int:
        """How many there are to store."""
        return sum(len(spec.ids) for spec in self.specs)

    def to_bytes(self) -> bytes:
        """JSON, in UTF-8, that ``from_bytes`` reads."""
        segments = _Segments()
        document = {
            "version": _VERSION,
            **{name: getattr(self, name) for name in _PLAIN_ENCODE},
            "fingerprint": self.fingerprint.hex(),
            "adapter": self.adapter.hex(),
            "specs": [segments.number(spec) for spec in self.specs],
            "segments": segments.written,
            "ttl": None if self.ttl_s is None else str(self.ttl_s),
        }
        return _as_bytes(document)

    @classmethod
    def from_bytes(cls, data: bytes, keys: KeyMaker) -> EncodeRequest:
        """Read what ``to_bytes`` wrote. keys: of the engine that is to store it. Raises ParameterError."""
        with _reading(data, keys) as document:
            specs = _read_segments(document, keys)
            return cls(
                specs=tuple(specs[number] for number in document["specs"]),
                ttl_s=None if document.get("ttl") is None else float(document["ttl"]),
                fingerprint=bytes.fromhex(document["fingerprint"]),
                adapter=bytes.fromhex(document["adapter"]),
                **{name: document[name] for name in _PLAIN_ENCODE},
            )


_PLAIN_ENCODE = ("request_id", "name", "salt", "tenant", "weight")


def _policy(written: list[Any], unprofiled: float | None) -> ReusePolicy:
    """A policy. unprofiled: how many first tokens modules without a profile have computed anew; None as written."""
    policy = ReusePolicy.parse(*written)
    return policy if unprofiled is None else replace(policy, unprofiled=Recompute("linked", unprofiled))


class _Segments:
    """Segments as rows: ids, start, number of the one before it, whether its record is somebody's, whether it is of
    the request's adapter."""

    def __init__(self) -> None:
        self.written: list[tuple[tuple[int, ...], int, int | None, bool, bool]] = []
        self._numbers: dict[SegmentSpec, int] = {}

    def number(self, spec: SegmentSpec) -> int:
        """The row of a segment, behind those that it attends to."""
        missing: list[SegmentSpec] = []
        at: SegmentSpec | None = spec
        while at is not None and at not in self._numbers:
            missing.append(at)
            at = at.parent
        for each in reversed(missing):
            parent = None if each.parent is None else self._numbers[each.parent]
            self._numbers[each] = len(self.written)
            self.written.append((each.ids, each.start, parent, each.before.private, bool(each.before.adapter)))
        return self._numbers[spec]


def _read_segments(document: Mapping[str, Any], keys: KeyMaker) -> list[SegmentSpec]:
    specs: list[SegmentSpec] = []
    own = bytes.fromhex(document["adapter"])
    for ids, start, parent, private, adapted in document["segments"]:
        context = () if parent is None else (specs[parent],)
        salt = document["salt"].encode() if private else b""
        specs.append(specify(tuple(ids), start, context, keys, salt, own if adapted else b""))
    return specs


@contextmanager
def _reading(data: bytes, keys: KeyMaker) -> Iterator[dict[str, Any]]:
    """What was written, for this model. Raises ParameterError, also for what a reader within stumbles over."""
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
            f"the request is of version {version!r:.40} and this reads version {_VERSION}", code="request.other_version"
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
    """A value as JSON has it, whatever mappings and sequences it is made of."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
