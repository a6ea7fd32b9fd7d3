"""The reuse policy: how much approximation a request accepts. No other file compares policy words."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from inlay.errors import PolicyError
from inlay.tolerance import WRITTEN, Measured, Tolerance
from inlay.wording import SHOWN, clip, show

_SHARE = r"(?:0(?:\.[0-9]{1,4})?|1(?:\.0{1,4})?)"
_AMOUNTS = {"linked": r"[0-9]{1,7}"} | dict.fromkeys(("profiled", "query", "profiled*query", "blend"), _SHARE)

KINDS = tuple(_AMOUNTS)

#: A regular expression of the written form.
RECOMPUTE = f"(?:{'|'.join(f'{re.escape(kind)}:{amount}' for kind, amount in _AMOUNTS.items())})"


@dataclass(frozen=True, slots=True)
class Recompute:
    """The choice of module tokens to recompute against the text before them.

    Args:
        kind: "linked" for the first tokens of each module (EPIC, arXiv 2410.15332). "profiled" for the tokens with the
            largest deviation behind other text. "query" for the tokens that the new text attends to most (ProphetKV,
            arXiv 2602.02579). "profiled*query" for the largest product of both. "blend" for the tokens whose keys
            deviate most in this prompt at a layer a third of the way up (CacheBlend, arXiv 2405.16444).
        amount: for "linked", the number of tokens of each module. Otherwise the share of all tokens read from modules,
            0 to 1.
    """

    kind: str
    amount: float

    def __str__(self) -> str:
        return f"{self.kind}:{f'{self.amount:.4f}'.rstrip('0').rstrip('.')}"

    @property
    def profiled(self) -> bool:
        """True if deviation profiles take part in the choice."""
        return self.kind in ("profiled", "profiled*query")

    @property
    def by_attention(self) -> bool:
        """True if the attention of the new text takes part in the choice."""
        return self.kind in ("query", "profiled*query")

    @property
    def by_keys(self) -> bool:
        """True if the choice depends on the deviation of keys in this prompt."""
        return self.kind == "blend"

    @property
    def selects(self) -> bool:
        """True if a pass before the prompt's own must choose tokens. Not needed for all or none."""
        return (self.by_attention or self.by_keys) and 0 < self.amount < 1

    def tokens(self, length: int) -> int:
        """Return how many of ``length`` tokens to recompute."""
        return min(int(self.amount), length) if self.kind == "linked" else round(self.amount * length)

    @classmethod
    def parse(cls, written: object, typed: str) -> Recompute:
        """Parse the written form. ``typed`` is the field as the user typed it, for errors. Raises PolicyError."""
        kind, _, amount = written.partition(":") if isinstance(written, str) else ("", "", "")
        if kind not in _AMOUNTS:
            wrong = f"{typed} names no selective recomputation. Use one of {', '.join(_AMOUNTS)}"
        elif re.fullmatch(_AMOUNTS[kind], amount) is not None:
            return cls(kind, float(amount))
        elif kind == "linked":
            wrong = f"{typed} has no valid amount. linked takes a whole number of tokens with at most 7 digits"
        else:
            wrong = f"{typed} has no valid amount. {kind} takes a share between 0 and 1 with at most 4 decimals"
        example = f"{kind if kind in _AMOUNTS else 'profiled'}:{16 if kind == 'linked' else 0.15}"
        raise PolicyError(f"{wrong}, like {example}.", field="recompute", code="policy.bad_recompute")


#: Levels of approximation, from none to all: no reuse, exact prefixes, modules.
LEVELS = ("off", "exact", "modular")

#: What a module sees when it is encoded: itself alone, also the always-present text before it, or between the two a
#: sample text (prompt/contexts.py).
CONTEXTS = ("isolated", "anchored", "primed")

#: Where modules stand: at their schema's positions, or one right behind the other.
POSITIONS = ("schema", "packed")

#: How modules are found beside marks and schemas: repeated text by its content (prompt/seen_pieces.py).
FINDS = ("content",)

#: Level and context of each word. A missing module is encoded primed under ``modular`` (docs/guides/which-policy.md).
_WORDS: dict[str, tuple[str, str | None]] = {
    "off": ("off", None),
    "exact": ("exact", None),
    "isolated": ("modular", "isolated"),
    "anchored": ("modular", "anchored"),
    "primed": ("modular", "primed"),
    "modular": ("modular", "primed"),
}
_BEST, _AUTO = "modular", "auto"
_ACROSS, _NOT_PROMOTED, _CONTENT = "across", "promote:off", FINDS[0]  # parts of a policy's key
_FORMERLY = "healing:off"  # the former name of _NOT_PROMOTED, which is still read
_NAMES = {_ACROSS: "across_adapters", _NOT_PROMOTED: "promote", _FORMERLY: "promote", _CONTENT: "find"}
_NOT_GIVEN = (None,) * 6  # of the fields
_PARSED = 256  # parsed policies that are remembered

#: The values of ``reuse`` without ``auto``.
WORDS = tuple(_WORDS)
_USE = f"Use one of {', '.join(WORDS)}, {_AUTO}."

#: A regular expression of a policy's key that is not one of the words: the deprecated form of ``reuse``.
KEY = (
    f"^(?:(?:{'|'.join(word for word, (level, _) in _WORDS.items() if level == 'modular')})"
    f"(?:\\+{_ACROSS})?(?:\\+{_CONTENT})?(?:\\+{RECOMPUTE})?"
    f"|{_BEST}(?:\\+{_ACROSS})?(?:\\+{_CONTENT})?(?:\\+{RECOMPUTE})?\\+(?:{_NOT_PROMOTED}|{_FORMERLY})"
    f"|{_AUTO}(?::{WRITTEN})?(?:\\+{_CONTENT})?)$"
)

#: The most approximation that a server may allow, from none to all.
CEILINGS = ("off", "exact", _AUTO, "modular")

#: Recomputes all tokens of a module, of any length.
WHOLE = Recompute("linked", 2**31 - 1)

#: The recomputation for a policy with too large a divergence from full prefill (docs/guides/reuse-policies.md).
_SAFER = Recompute("profiled", 0.15)

#: The recomputation under ``find`` without another one. Unmarked text often depends on the text before it.
_FOUND = Recompute("profiled", 0.1)

#: Set after the first deprecated policy of this process was logged.
LOGGED = threading.Event()

logger = logging.getLogger(__name__)


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, slots=True)
class PolicyFields:
    """The fields of a reuse policy, as frontends take them. None leaves a field out.

    ``reuse`` may hold a ReusePolicy, or a policy's key in place of the other fields, which is deprecated.
    """

    reuse: str | ReusePolicy | None = field(
        default=None,
        metadata=_help(
            f"{', '.join(WORDS)} or {_AUTO}. If not given, modular for prompts with modules, exact for others"
        ),
    )
    recompute: str | None = field(
        default=None,
        metadata=_help(
            "module tokens to recompute: a number like linked:16, or a share like profiled:0.15 (also query, "
            "profiled*query, blend)"
        ),
    )
    promote: bool | None = field(
        default=None,
        metadata=_help("false: under modular, never read the exact KV of earlier requests in place of modules"),
    )
    across_adapters: bool | None = field(
        default=None, metadata=_help("true: also read modules that were encoded without the request's adapter")
    )
    tolerance: float | str | None = field(
        default=None,
        metadata=_help(
            "of reuse auto: the largest divergence in nats per token, or the least share of equal answers, like "
            "answers:0.98"
        ),
    )
    find: str | None = field(
        default=None,
        metadata=_help(
            "content: also read unmarked text as modules if it repeats; recompute is then profiled:0.1 by default"
        ),
    )

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the fields beside ``reuse`` that are not None."""
        return tuple(name for name in FIELDS if getattr(self, name) is not None)

    def policy(
        self,
        positions: object = None,
        *,
        options: bool = False,
        deprecated: Callable[[str], None] | None = None,
    ) -> ReusePolicy | None:
        """Return the policy, or None if no field is given. Without ``reuse``, the other fields refine ``modular``.

        Args:
            positions: a word of POSITIONS, or None.
            options: True if messages name command line options.
            deprecated: called with a sentence for a key in ``reuse``. None for a DeprecationWarning.

        Raises:
            PolicyError: for a wrong value, or for fields that exclude each other.
        """
        given = (self.reuse, self.recompute, self.promote, self.across_adapters, self.tolerance, self.find)
        if given == _NOT_GIVEN:
            return None
        try:
            policy, told = _parsed(*given, positions, options)
        except TypeError:  # a value without a hash
            policy, told = _parsed.__wrapped__(*given, positions, options)
        if told is not None and deprecated is None:
            warnings.warn(told, DeprecationWarning, stacklevel=3)
        elif told is not None and deprecated is not None:
            deprecated(told)
        return policy

    def _parse(self, positions: object, options: bool) -> tuple[ReusePolicy, str | None]:
        """Return the policy, and a sentence if ``reuse`` holds a deprecated key. Arguments and errors of ``policy``."""
        if isinstance(self.reuse, ReusePolicy) and not self.given:
            return self.reuse if positions is None else replace(self.reuse, positions=check_positions(positions)), None
        key = str(self.reuse) if isinstance(self.reuse, ReusePolicy) else self.reuse
        found = replace(self, reuse=_BEST) if key is None else _fields_of(key, options)
        typed = {name: _typed("reuse", key, options) for name in found.given}  # where an error lies
        for name in self.given:
            if name in typed and key is not None:
                merged = replace(found, **{each: getattr(self, each) for each in self.given})
                wrong = f"{typed[name]} and {_typed(name, getattr(self, name), options)} both set {name}"
                raise PolicyError(f"{wrong}. Write {merged.written(options)}.", field=name, code="policy.conflict")
            typed[name] = _typed(name, getattr(self, name), options)
        glued = found if key is not None and found.given else None
        found = replace(found, **{name: getattr(self, name) for name in self.given})
        policy = replace(_policy(found, typed, options), positions=check_positions(positions))
        if glued is None or isinstance(self.reuse, ReusePolicy):
            return policy, None
        return policy, f"{_typed('reuse', key, options)} is deprecated. Write {glued.written(options)}."

    def written(self, options: bool = False) -> str:
        """Return the given fields as a user writes them."""
        names = ("reuse", *self.given)
        return (" " if options else ", ").join(_typed(name, getattr(self, name), options) for name in names)

    @staticmethod
    def help(name: str) -> str:
        """Return the description of a field."""
        return str(next(each for each in fields(PolicyFields) if each.name == name).metadata["help"])


#: The names of the fields beside ``reuse``.
FIELDS = tuple(each.name for each in fields(PolicyFields) if each.name != "reuse")


def log_deprecated(message: str) -> None:
    """Log the first deprecated policy of this process, for ``PolicyFields.policy``."""
    if not LOGGED.is_set():
        LOGGED.set()
        logger.warning("%s", message)


@dataclass(frozen=True, slots=True)
class ReusePolicy:
    """The approximation that a request accepts. ``str`` gives its key, for logs and measurement files.

    Args:
        level: a word of LEVELS.
        context: the encoding context of modules, a word of CONTEXTS. None if none are read.
        positions: a word of POSITIONS. None for the best that the model allows, until ``settled``.
        recompute: the module tokens to recompute. None for none.
        across_adapters: True if a request with an adapter may read modules encoded without it.
        best: True if a module is read in the most exact form that is stored. False: only in the form of ``context``.
        promote: with ``best``: False if the form must not depend on earlier requests.
        tolerance: of ``auto``, which ``resolved`` replaces by measurements. None for every other policy.
        find: a word of FINDS. None if only marked text and schemas make modules.
        unprofiled: how modules without a profile are recomputed under ``profiled``. None: the same share, as first
            tokens. Not part of the key.
    """

    level: str
    context: str | None = None
    positions: str | None = None
    recompute: Recompute | None = None
    across_adapters: bool = False
    best: bool = False
    promote: bool = True
    tolerance: Tolerance | None = None
    unprofiled: Recompute | None = None
    find: str | None = None

    @classmethod
    def parse(cls, key: object, positions: object = None) -> ReusePolicy:
        """Return the policy of a key. Raises PolicyError."""
        try:
            return _parsed_key(key, positions)
        except TypeError:  # a value without a hash
            return _parsed_key.__wrapped__(key, positions)

    @classmethod
    def named(cls, key: str) -> ReusePolicy | None:
        """Return the policy of a key, or None for an unknown one."""
        try:
            return cls.parse(key)
        except PolicyError:
            return None

    @classmethod
    def least(cls, *keys: str | None) -> ReusePolicy:
        """Return the policy that allows the least. None stands for no bound."""
        return min((cls.parse(key) for key in keys if key is not None), key=lambda policy: policy._rank)

    @classmethod
    def ahead(cls, default: ReusePolicy | None, ceiling: ReusePolicy) -> ReusePolicy:
        """Return the policy to encode schemas for by default: ``auto`` if their prompts get it, else ``modular``.

        Args:
            default: the server's default. None for ``default_policy``.
            ceiling: the most that requests may ask for.
        """
        asked = default or BEST
        return next((policy for policy in (asked, ceiling) if policy.auto), BEST)

    @classmethod
    def bounded(
        cls,
        asked: ReusePolicy | None,
        default: ReusePolicy,
        ceiling: ReusePolicy,
        measured: Sequence[Measured] = (),
    ) -> ReusePolicy | None:
        """Return the policy of a request; None if it asks for more than the ceiling.

        Args:
            asked: what it asks for. None for the default, or the ceiling if that is less.
            measured: see ``within``.
        """
        if asked is not None:
            return asked if asked.within(ceiling, measured) else None
        return default if default.within(ceiling, measured) else ceiling

    def __str__(self) -> str:
        if self.tolerance is not None:
            word = f"{_AUTO}:{self.tolerance}" if self.tolerance.given else _AUTO
            return f"{word}+{self.find}" if self.find else word
        parts = (
            _BEST if self.best else self.context or self.level,
            _ACROSS if self.across_adapters else "",
            self.find or "",
            "" if self.recompute is None else str(self.recompute),
            "" if self.promote else _NOT_PROMOTED,
        )
        return "+".join(filter(None, parts))

    def in_words(self) -> str:
        """Return the policy as its fields, for people: ``modular, recompute profiled:0.1``."""
        fields_of = _fields_of(str(self))
        return ", ".join(
            [str(fields_of.reuse), *(f"{name} {getattr(fields_of, name)}".lower() for name in fields_of.given)]
        )

    @property
    def reads_nothing(self) -> bool:
        """True if all of a prompt is computed."""
        return self.level == "off"

    @property
    def modular(self) -> bool:
        """True if the policy reads modules, which were encoded in another context."""
        return self.level == "modular"

    @property
    def anchored(self) -> bool:
        """True if a module is encoded behind the always-present text before it."""
        return self.context in ("anchored", "primed")

    @property
    def primed(self) -> bool:
        """True if a module is encoded behind a sample text as well (prompt/contexts.py)."""
        return self.context == "primed"

    @property
    def reads_promoted(self) -> bool:
        """True if a module is read in a more exact form than its encoding, if one is stored."""
        return self.best and self.promote

    @property
    def finds(self) -> bool:
        """True if repeated text without marks is read as modules."""
        return self.find is not None

    @property
    def moves_text(self) -> bool:
        """True if text of a conversation is read as an earlier request computed it, behind other text.

        Not with recomputed tokens, because these must not be those of another request.
        """
        return self.reads_promoted and self.recompute is None

    @property
    def chooses_order(self) -> bool:
        """True if stored text may decide the order of modules that a prompt leaves free."""
        return self.level == "exact" or self.reads_promoted

    @property
    def profiled(self) -> bool:
        """True if deviation profiles take part in the choice of recomputed tokens."""
        return self.recompute is not None and self.recompute.profiled

    @property
    def packed(self) -> bool:
        """True if all text stands without gaps. Of a settled policy."""
        return self.positions == "packed"

    @property
    def auto(self) -> bool:
        """True if measurements choose the policy."""
        return self.tolerance is not None

    @property
    def plain(self) -> bool:
        """True if no field beside ``reuse``, ``positions`` and ``tolerance`` is set."""
        return self.recompute is None and not self.across_adapters and self.promote and self.find is None

    def within(self, ceiling: ReusePolicy, measured: Sequence[Measured] = ()) -> bool:
        """Return True if the policy accepts no more approximation than the ceiling, by its level.

        Args:
            measured: results of ``inlay check``. A settled policy may be within the tolerance of ``auto`` by them.
        """
        if ceiling.tolerance is None or self._rank <= LEVELS.index("exact"):
            return self._rank <= ceiling._rank
        if self.tolerance is not None:
            return not self.tolerance.given or ceiling.tolerance.covers(self.tolerance)
        row = self.row(measured)
        return row is not None and ceiling.tolerance.allows(row)

    def tolerating(self, default: Tolerance) -> ReusePolicy:
        """Return this policy, with the default tolerance if it is ``auto`` without one."""
        if self.tolerance is None or self.tolerance.given:
            return self
        return replace(self, tolerance=default)

    def resolved(self, measured: Sequence[Measured], why_not_shift: str | None) -> ReusePolicy:
        """Return what ``auto`` chooses: of the measured policies within its tolerance, the one that computes least.

        ``exact`` if none is within the tolerance. A policy other than ``auto`` is returned unchanged. If the chosen
        policy needs profiles, modules without one get a ``linked`` recomputation that is within the tolerance too. If
        there is none, they are recomputed whole.

        Args:
            measured: results of ``inlay check`` for these prompts.
            why_not_shift: see ``settled``.
        """
        if self.tolerance is None:
            return self
        positions = (replace(BEST, positions=self.positions)).settled(why_not_shift).positions
        rows = [row for row in measured if row.positions == positions and self.tolerance.allows(row)]
        found = [(row.recomputed, row.kl, policy) for row in rows if (policy := self.named(row.policy)) is not None]
        modular = [each for each in found if each[2].modular and not each[2].auto]
        taken = min(modular, key=lambda each: each[:2])[2] if modular else EXACT
        if taken.profiled:
            base = replace(taken, recompute=None)
            alike = [policy.recompute for _, _, policy in modular if replace(policy, recompute=None) == base]
            linked = [recompute for recompute in alike if recompute is not None and recompute.kind == "linked"]
            if None in alike:
                linked.append(Recompute("linked", 0))
            taken = replace(taken, unprofiled=min(linked, key=lambda recompute: recompute.amount, default=WHOLE))
        return replace(taken, positions=self.positions, find=self.find if taken.modular else None)

    def row(self, measured: Sequence[Measured]) -> Measured | None:
        """Return the measurement of this policy at its settled positions, or None.

        A policy with promotion counts as measured without it, because promotion only makes answers more exact. Found
        text counts as marked text.
        """
        key = str(replace(self, promote=True, find=None))
        return next((row for row in measured if row.policy == key and row.positions == self.positions), None)

    def settled(self, why_not_shift: str | None) -> ReusePolicy:
        """Return this policy with positions.

        Args:
            why_not_shift: the reason why the model cannot read shifted segments, or None.

        Raises:
            PolicyError: if the model cannot read modules at these positions, or text that it finds.
        """
        assert self.tolerance is None, "resolve auto first"
        if self.modular and self.packed and why_not_shift is not None:
            wrong = f"positions 'packed' with reuse '{self}' reads segments at a shift, which this model does not allow"
            message = f"{wrong}: {why_not_shift}; use positions 'schema'"
            raise PolicyError(message, field="positions", code="policy.unsupported")
        if self.finds and why_not_shift is not None:
            wrong = f"find='{self.find}' reads segments at a shift, which this model does not allow: {why_not_shift}"
            raise PolicyError(f"{wrong}; leave find out", field="find", code="policy.unsupported")
        if self.positions is not None:
            return self
        return replace(self, positions="schema" if self.modular and why_not_shift is not None else "packed")

    def check_allowed(self, highest: str | None, why: str | None) -> ReusePolicy:
        """Return this settled policy.

        Args:
            highest: the highest policy that the model allows, "off" or "exact". None for all policies.
            why: the reason why it allows no more.

        Raises:
            PolicyError: if the policy reads more than the model allows, or leaves gaps.
        """
        if highest is None:
            return self
        if self._rank > LEVELS.index(highest):
            message = f"reuse is '{self}', and {why}; leave reuse out, or give '{highest}'"
            raise PolicyError(message, field="reuse", code="policy.unsupported")
        if not self.packed:
            message = f"positions is '{self.positions}', and {why}; leave positions out"
            raise PolicyError(message, field="positions", code="policy.unsupported")
        return self

    def with_states(self, first_tokens: int) -> ReusePolicy:
        """Return this settled policy for a model with recurrent layers, which recomputes first tokens alone.

        A module's first tokens do not know the text before the module. Later ones know their state, which is stored
        behind the module's last token alone. So no token within a module can be recomputed.

        Args:
            first_tokens: the number of first tokens without another ``recompute``.

        Raises:
            PolicyError: if the policy recomputes other tokens.
        """
        if not self.modular:
            return self
        why = "this model has recurrent layers, whose states are not stored within a module"
        if self.finds:
            raise PolicyError(
                f"find is '{self.find}', and {why}; leave find out", field="find", code="policy.unsupported"
            )
        first = Recompute("linked", first_tokens)
        if self.recompute is None:
            return replace(self, recompute=first)
        if self.recompute.kind != first.kind:
            message = f"recompute is '{self.recompute}', and {why}; leave recompute out, or give '{first}'"
            raise PolicyError(message, field="recompute", code="policy.unsupported")
        return self

    def alone(self) -> ReusePolicy:
        """Return ``off`` at the same positions."""
        return replace(self.without_recompute(), level="off", context=None)

    def safer(self, *, profiles: bool) -> ReusePolicy:
        """Return the next policy towards full prefill: more recomputation, then ``exact``.

        Args:
            profiles: True if modules have profiles. Without them, more recomputation is not worth its price.
        """
        if not self.modular:
            return self
        own = self.recompute
        less = own is None or own.kind == "linked" or (own.kind == _SAFER.kind and own.amount < _SAFER.amount)
        return replace(self, recompute=_SAFER) if profiles and less else replace(EXACT, positions="packed")

    def without_recompute(self) -> ReusePolicy:
        """Return the part of this policy that modules are encoded for."""
        return replace(
            self, recompute=None, across_adapters=False, best=False, promote=True, unprofiled=None, find=None
        )

    @property
    def _rank(self) -> float:
        """The level. ``auto`` is between ``exact`` and the policies that read modules."""
        return LEVELS.index(self.level) - (0.5 if self.auto else 0.0)


def check_positions(positions: object) -> str | None:
    """Return a word of POSITIONS, or None. Raises PolicyError."""
    if positions is None or (isinstance(positions, str) and positions in POSITIONS):
        return positions
    message = f"positions is {show(positions)}; use one of {', '.join(POSITIONS)}"
    raise PolicyError(message, field="positions", code="policy.bad_positions")


def check_schema_fields(given: Iterable[str], where: str) -> None:
    """Raise PolicyError for a field that only requests have. ``where`` is the call or route that encodes a schema."""
    for name in given:
        if name in ("recompute", "promote", "across_adapters", "find"):
            message = f"{name} has no effect on {where}. Give {name} with each request; leave it out here."
            raise PolicyError(message, field=name, code="policy.not_for_schemas")


# Typed caches, because ``promote=1`` is an error and ``promote=True`` is none.
@lru_cache(maxsize=_PARSED, typed=True)
def _parsed(
    reuse: str | ReusePolicy | None,
    recompute: str | None,
    promote: bool | None,
    across_adapters: bool | None,
    tolerance: float | str | None,
    find: str | None,
    positions: object,
    options: bool,
) -> tuple[ReusePolicy, str | None]:
    given = PolicyFields(reuse, recompute, promote, across_adapters, tolerance, find)
    return given._parse(positions, options)


@lru_cache(maxsize=_PARSED, typed=True)
def _parsed_key(key: object, positions: object) -> ReusePolicy:
    found = _fields_of(key)
    typed = {name: _typed("reuse", key) for name in found.given}
    return replace(_policy(found, typed), positions=check_positions(positions))


def _typed(name: str, value: object, options: bool = False) -> str:
    """Return a field as the user typed it, in Python or on the command line."""
    if not options:
        return f"{name}={show(value)}"
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{option}"
    return f"--{option} {clip(str(value))}"


def _fields_of(key: object, options: bool = False) -> PolicyFields:
    """Split a policy's key into fields, unchecked but for the base policy. Raises PolicyError."""
    typed = _typed("reuse", key, options)
    if not isinstance(key, str):
        raise PolicyError(f"{typed} is not a reuse policy. {_USE}", field="reuse", code="policy.unknown")
    word, *parts = key.split("+")
    word, colon, tolerance = word.partition(":") if word.startswith(f"{_AUTO}:") else (word, "", "")
    if word not in _WORDS and word != _AUTO:
        if word.partition(":")[0] in KINDS:
            meant = replace(_fields_of(_BEST), recompute=key).written(options)
            raise PolicyError(f"{typed} has no base policy. Write {meant}.", field="reuse", code="policy.no_base")
        near = get_close_matches(word[:SHOWN].lower(), (*WORDS, _AUTO), 1)
        remedy = f"Did you mean {_typed('reuse', near[0], options)}?" if near else _USE
        raise PolicyError(f"{typed} is not a reuse policy. {remedy}", field="reuse", code="policy.unknown")
    found = PolicyFields(word, tolerance=tolerance if colon else None)
    for part in parts:
        name = _NAMES.get(part, "recompute")
        if getattr(found, name) is not None:
            message = f"{typed} sets {name} twice. Write {found.written(options)}."
            raise PolicyError(message, field="reuse", code="policy.conflict")
        value: Any = {"across_adapters": True, "promote": False}.get(name, part)
        found = replace(found, **{name: value})
    return found


def _policy(given: PolicyFields, typed: dict[str, str], options: bool = False) -> ReusePolicy:
    """Check fields against each other and return their policy.

    Args:
        given: with a word in ``reuse``.
        typed: field → the field as the user typed it.
    """
    word = str(given.reuse)
    reuse = _typed("reuse", word, options)

    def refuse(name: str, reason: str, code: str = "policy.conflict") -> PolicyError:
        return PolicyError(f"{typed[name]} {reason}", field=name, code=code)

    for name in ("promote", "across_adapters"):
        if not isinstance(getattr(given, name), bool | None):
            raise refuse(name, "is not a switch. Write true or false.", f"policy.bad_{name}")
    if given.find not in (None, *FINDS):
        raise refuse("find", f"is not known. Use {', '.join(FINDS)}, or leave find out.", "policy.bad_find")
    recompute = None if given.recompute is None else Recompute.parse(given.recompute, typed["recompute"])
    if word == _AUTO:
        for name in ("recompute", "promote", "across_adapters"):
            if getattr(given, name) not in (None, name == "promote"):
                raise refuse(name, f"excludes {reuse}, which chooses by measurement. Leave {name} out.")
        within = Tolerance() if given.tolerance is None else Tolerance.parse(given.tolerance, typed["tolerance"])
        return ReusePolicy("modular", tolerance=within, find=given.find)
    if given.tolerance is not None:
        auto = _typed("reuse", _AUTO, options)
        raise refuse("tolerance", f"belongs to {auto}, not to {reuse}. Write {auto}, or leave tolerance out.")
    level, context = _WORDS[word]
    best = _typed("reuse", _BEST, options)
    for name in ("recompute", "across_adapters", "find"):
        if getattr(given, name) not in (None, False) and level != "modular":
            raise refuse(name, f"needs modules, and {reuse} reads none. Leave {name} out, or write {best}.")
    if given.promote is False and word != _BEST:
        raise refuse("promote", f"has no effect, because {reuse} reads no promoted text. Leave promote out.")
    return ReusePolicy(
        level,
        context,
        recompute=_FOUND if given.find and recompute is None else recompute,
        across_adapters=bool(given.across_adapters),
        best=word == _BEST,
        promote=given.promote is not False,
        find=given.find,
    )


#: The policy that modules are encoded for by default.
BEST = ReusePolicy.parse("modular")
EXACT = ReusePolicy.parse("exact")
OFF = ReusePolicy.parse("off")
AUTO = ReusePolicy.parse(_AUTO)


def default_policy(*, modules: bool, highest: str | None = None, measured: bool = False) -> ReusePolicy:
    """Return the policy of a request without one, on every frontend (docs/guides/reuse-policies.md).

    Args:
        modules: True if the request has a schema, or marks parts of messages.
        highest: the highest policy that the model allows, "off" or "exact". None for all policies.
        measured: True if ``inlay check`` has measured the model. Then its result decides what modules are read.
    """
    if highest is not None:
        return ReusePolicy.parse(highest)
    if not modules:
        return EXACT
    return AUTO if measured else BEST
