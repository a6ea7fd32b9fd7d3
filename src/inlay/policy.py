"""ReusePolicy: how much approximation a request accepts, as one object. No other file compares policy words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from inlay.errors import ParameterError
from inlay.recompute import LIKE, RECOMPUTE, Recompute, is_recompute
from inlay.tolerance import WRITTEN, Measured, Tolerance
from inlay.wording import SHOWN, show

#: How much approximation there may be, from none to all: nothing is reused; exact prefixes are; modules are, too.
LEVELS = ("off", "exact", "modular")

#: What a module sees when it is encoded: itself alone; or also the always-present text before it (prompt/contexts.py).
CONTEXTS = ("isolated", "anchored")

#: Where modules stand: where their schema has them, or one right behind the other.
POSITIONS = ("schema", "packed")

_WRITTEN: dict[str, tuple[str, str | None]] = {
    "off": ("off", None),
    "exact": ("exact", None),
    "isolated": ("modular", "isolated"),
    "anchored": ("modular", "anchored"),
    "modular": ("modular", "anchored"),  # what is nowhere is encoded as the better one of the two (docs/quality.md)
}

#: The word for the most exact form that is stored, and what ends a policy that does not look for that.
_BEST, _HEALING_OFF = "modular", "healing:off"

#: The word for the cheapest policy that was measured to be near enough to full prefill.
_AUTO = "auto"

#: All words that are a policy's written form, or stand for one: the same on every face.
WORDS = tuple(_WRITTEN)

_READ = "|".join(word for word, (level, _) in _WRITTEN.items() if level == "modular")

_END = f"(?:\\+{RECOMPUTE})?"

#: What a policy with a repair, or without healing, is written like, as a regular expression; and one that reads across
#: adapters.
RECOMPUTED = f"^(?:(?:{_READ})\\+{RECOMPUTE}|{_BEST}{_END}\\+{_HEALING_OFF})$"
ACROSS = f"^(?:(?:{_READ})\\+across{_END}|{_BEST}\\+across{_END}\\+{_HEALING_OFF})$"

#: What ``auto`` is written like, alone or with a tolerance of its own, as a regular expression.
TOLERANT = f"^{_AUTO}(?::{WRITTEN})?$"

#: How much approximation a server may allow at most, from none to all.
CEILINGS = ("off", "exact", _AUTO, "modular")

_LIKE_ACROSS = "write it like anchored+across, or anchored+across+linked:16"


#: All of a module, however long it is.
WHOLE = Recompute("linked", 2**31 - 1)

#: What a policy is repaired by where it is found to go too far from full prefill (docs/quality.md).
_SAFER = Recompute("profiled", 0.15)


@dataclass(frozen=True, slots=True)
class ReusePolicy:
    """What a request accepts in place of its own full prefill. ``str`` gives its written form, which ``parse`` reads.

    level: a word of LEVELS. context: what modules were encoded under, a word of CONTEXTS; None where none are read.
    positions: a word of POSITIONS; None for the best that the model allows, until ``settled``.
    repair: which tokens of modules are computed anew all the same; None for none.
    across: whether a request with an adapter may read modules that were encoded without it.
    best: whether a module is read in the most exact form that is stored, not as ``context`` has it alone.
    healing: of ``best``: whether what others leave in the store may make a form more exact; else it depends on the
        request alone which form is read.
    unprofiled: of a profiled repair: what is computed anew of modules that have no profile yet; None for as many first
        tokens as the share says. It is not written.
    tolerance: of ``auto``, which no engine takes: what has been measured says which policy it is (``resolved``). None
        for every other policy.
    """

    level: str
    context: str | None = None
    positions: str | None = None
    recompute: Recompute | None = None
    across: bool = False
    best: bool = False
    healing: bool = True
    tolerance: Tolerance | None = None
    unprofiled: Recompute | None = None

    @classmethod
    def parse(cls, reuse: object, positions: object = None) -> ReusePolicy:
        """The policy that is written so. Raises ParameterError."""
        word, across, recompute, healing = _cut(reuse)
        name, colon, tolerance = word.partition(":")
        if name == _AUTO:
            if word != reuse:
                raise ParameterError(
                    f"reuse is {show(reuse)}, and what '{_AUTO}' is comes of what was measured; write '{word}' alone"
                )
            within = Tolerance.parse(tolerance, f"the tolerance of reuse {show(reuse)}") if colon else Tolerance()
            return cls("modular", positions=_positions(positions), tolerance=within)
        if recompute is not None and f"+{_HEALING_OFF}" in f"+{recompute}":
            raise ParameterError(
                f"reuse is {show(reuse)}, and '+{_HEALING_OFF}' stands at its end, once; write it like "
                f"{_BEST}+linked:16+{_HEALING_OFF}"
            )
        if word not in _WRITTEN:
            if is_recompute(word):
                raise ParameterError(f"reuse is {show(reuse)}, a repair of no policy; write it like {_BEST}+{word}")
            near = get_close_matches(word[:SHOWN].lower(), (*WORDS, _AUTO), 1)
            if near:
                raise ParameterError(f"{show(word)} is no reuse policy; did you mean '{near[0]}'?")
            raise ParameterError(f"reuse is {show(reuse)}; use one of {', '.join(WORDS)}, {_AUTO}")
        level, context = _WRITTEN[word]
        if across and level != "modular":
            raise ParameterError(
                f"reuse is {show(reuse)}, and '{word}' reads no modules that could be another adapter's; leave "
                f"'+across' out, or {_LIKE_ACROSS}"
            )
        if recompute is not None and level != "modular":
            raise ParameterError(
                f"reuse is {show(reuse)}, and '{word}' reads no modules that could be repaired; "
                f"leave '+{recompute}' out, or {LIKE}"
            )
        if not healing and word != _BEST:
            raise ParameterError(
                f"reuse is {show(reuse)}, and '{word}' is the same whatever is stored; leave '+{_HEALING_OFF}' out"
            )
        positions = _positions(positions)
        if recompute is not None and recompute.endswith("across"):
            raise ParameterError(f"reuse is {show(reuse)}, and '+across' stands before a repair; {_LIKE_ACROSS}")
        made = None if recompute is None else Recompute.parse(recompute, str(reuse))
        return cls(level, context, positions, made, across, best=word == _BEST, healing=healing)

    @classmethod
    def named(cls, written: str) -> ReusePolicy | None:
        """The policy that is written so, or None where there is none."""
        try:
            return cls.parse(written)
        except ParameterError:
            return None

    @classmethod
    def least(cls, *written: str | None) -> ReusePolicy:
        """The one of these policies that allows the least; None stands for no bound."""
        return min((cls.parse(word) for word in written if word is not None), key=lambda policy: policy._rank)

    @classmethod
    def ahead(cls, default: str | None, ceiling: ReusePolicy) -> ReusePolicy:
        """What schemas are encoded for ahead of requests where nobody says: ``auto`` where that is what these get.

        default: the policy of requests that bring none; None for that of ``default_policy``. ceiling: the most that
            they may ask for.
        """
        asked = BEST if default is None else cls.parse(default)
        return next((policy for policy in (asked, ceiling) if policy.auto), BEST)

    @classmethod
    def bounded(
        cls,
        asked: ReusePolicy | None,
        default: ReusePolicy,
        ceiling: ReusePolicy,
        measured: Sequence[Measured] = (),
    ) -> ReusePolicy | None:
        """What a request gets: what it asks for; where it does not say, the default, or the ceiling where that is less.

        measured: see ``within``. None where it asks for more than the ceiling.
        """
        if asked is not None:
            return asked if asked.within(ceiling, measured) else None
        return default if default.within(ceiling, measured) else ceiling

    def __str__(self) -> str:
        if self.tolerance is not None:
            return f"{_AUTO}:{self.tolerance}" if self.tolerance.given else _AUTO
        words = [_BEST if self.best else self.context or self.level]
        words += ["across"] if self.across else []
        words += [] if self.recompute is None else [str(self.recompute)]
        return "+".join(words if self.healing else [*words, _HEALING_OFF])

    @property
    def reads_nothing(self) -> bool:
        """Whether all of a prompt is computed for it."""
        return self.level == "off"

    @property
    def modular(self) -> bool:
        """Whether modules are read that were encoded in another context."""
        return self.level == "modular"

    @property
    def anchored(self) -> bool:
        """Whether a module is encoded behind the always-present text before it."""
        return self.context == "anchored"

    @property
    def heals(self) -> bool:
        """Whether a module is read in a more exact form than it was encoded in, where such a one is stored."""
        return self.best and self.healing

    @property
    def chooses_order(self) -> bool:
        """Whether what is stored may say in which order modules stand, where a prompt leaves that free."""
        return self.level == "exact" or self.heals

    @property
    def profiled(self) -> bool:
        """Whether what is computed anew depends on how much tokens of modules move."""
        return self.recompute is not None and self.recompute.profiled

    @property
    def packed(self) -> bool:
        """Whether everything follows what stands before it, without a gap. Of one that is ``settled``."""
        return self.positions == "packed"

    @property
    def auto(self) -> bool:
        """Whether what has been measured says which policy it is."""
        return self.tolerance is not None

    def within(self, ceiling: ReusePolicy, measured: Sequence[Measured] = ()) -> bool:
        """Whether it accepts no more approximation than another one, by its level: a repair only takes from that, and
        of all that read modules none is bounded.

        measured: what is known of the model, by which a policy that is ``settled`` may be within the tolerance of
            ``auto``.
        """
        if ceiling.tolerance is None or self._rank <= LEVELS.index("exact"):
            return self._rank <= ceiling._rank
        if self.tolerance is not None:
            return not self.tolerance.given or ceiling.tolerance.covers(self.tolerance)
        row = self.row(measured)
        return row is not None and ceiling.tolerance.allows(row)

    def tolerating(self, default: Tolerance) -> ReusePolicy:
        """This policy; ``auto`` with this tolerance where it has none of its own."""
        if self.tolerance is None or self.tolerance.given:
            return self
        return replace(self, tolerance=default)

    def resolved(self, measured: Sequence[Measured], why_not_shift: str | None) -> ReusePolicy:
        """The policy that ``auto`` is: the one that computes least of those that are within its tolerance, ``exact``
        where none is. Any other policy is itself. Modules without a profile get what was measured to be within it
        without profiles: the same policy with a ``linked`` repair, or else they are computed anew whole.

        measured: what is known of the model and what is asked of it. why_not_shift: see ``settled``.
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
        return replace(taken, positions=self.positions)

    def row(self, measured: Sequence[Measured]) -> Measured | None:
        """What was measured of this policy, which is without healing what it is with it at worst; None for nothing.

        What was measured where modules stand elsewhere says nothing of it, and nothing is known of one whose positions
        are not settled.
        """
        named = str(replace(self, healing=True))
        return next((row for row in measured if row.policy == named and row.positions == self.positions), None)

    def settled(self, why_not_shift: str | None) -> ReusePolicy:
        """This policy with positions. why_not_shift: the reason why a model reads nothing at a shift, or None.

        Raises ParameterError where the model cannot do what is asked.
        """
        assert self.tolerance is None, "what has been measured says which policy it is"
        if self.modular and self.packed and why_not_shift is not None:
            raise ParameterError(
                f"positions 'packed' with reuse '{self}' reads segments at a shift, which this model does not allow: "
                f"{why_not_shift}; use positions 'schema'"
            )
        if self.positions is not None:
            return self
        return replace(self, positions="schema" if self.modular and why_not_shift is not None else "packed")

    def check_shared(self, why_unshared: str | None) -> ReusePolicy:
        """This policy, ``settled``. why_unshared: why nothing of what a model computes can be read again, or None.

        Raises ParameterError where it would read any of it, or leave gaps between positions.
        """
        if why_unshared is not None and not self.reads_nothing:
            raise ParameterError(f"reuse is '{self}', and {why_unshared}; leave reuse out, or give 'off'")
        if why_unshared is not None and not self.packed:
            raise ParameterError(f"positions is '{self.positions}', and {why_unshared}; leave positions out")
        return self

    def alone(self) -> ReusePolicy:
        """This policy for a prompt of which everything is computed: it stands where it did, and nothing is reused."""
        plain = replace(self, recompute=None, across=False, best=False, healing=True, unprofiled=None)
        return replace(plain, level="off", context=None)

    def safer(self, *, profiles: bool) -> ReusePolicy:
        """The next policy on the way to full prefill: the same with more repair, then ``exact``, where that way ends.

        profiles: whether modules have profiles, without which more repair is not worth its price.
        """
        if not self.modular:
            return self
        recompute, safer = self.recompute, _SAFER
        less = (
            recompute is None
            or recompute.kind == "linked"
            or (recompute.kind == safer.kind and recompute.amount < safer.amount)
        )
        if profiles and less:
            return replace(self, recompute=safer)
        return replace(EXACT, positions="packed")

    def without_recompute(self) -> ReusePolicy:
        """This policy as far as it says what modules are encoded as, and where they stand."""
        return replace(self, recompute=None, across=False, best=False, healing=True, unprofiled=None)

    @property
    def _rank(self) -> float:
        """By its level; ``auto`` is between those that read no modules and those that read them anyway."""
        return LEVELS.index(self.level) - (0.5 if self.auto else 0.0)


def _positions(positions: object) -> str | None:
    """A word of POSITIONS, or None. Raises ParameterError."""
    if positions is not None and (not isinstance(positions, str) or positions not in POSITIONS):
        raise ParameterError(f"positions is {show(positions)}; use one of {', '.join(POSITIONS)}")
    return positions


def _cut(reuse: object) -> tuple[str, bool, str | None, bool]:
    """The word that a policy begins with, whether it reads across adapters, its repair, and whether it heals.

    The word is "" for what is no text.
    """
    if not isinstance(reuse, str):
        return "", False, None, True
    asked = reuse.removesuffix(f"+{_HEALING_OFF}")
    word, plus, rest = asked.partition("+")
    first, more, recompute = rest.partition("+")
    if first == "across":
        return word, True, recompute if more else None, asked == reuse
    return word, False, rest if plus else None, asked == reuse


#: What modules are encoded for where nobody says.
BEST = ReusePolicy.parse("modular")
EXACT = ReusePolicy.parse("exact")
OFF = ReusePolicy.parse("off")


def default_policy(*, modules: bool, shared: bool = True) -> ReusePolicy:
    """The policy of a request that does not say, on every face (docs/reuse.md).

    modules: whether the request has any: it is of a schema, or marks parts of messages. shared: whether anything of
    what the model computes can be read again.
    """
    if not shared:
        return OFF
    return BEST if modules else EXACT
