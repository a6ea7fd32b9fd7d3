"""ReusePolicy: how much approximation a request accepts, as one object. No other file compares policy words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inlay.errors import ParameterError
from inlay.wording import show

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
    "modular": ("modular", "anchored"),  # the better one of the two that are (docs/quality.md)
}

#: All words that are a policy's written form, or stand for one: the same on every face.
WORDS = tuple(_WRITTEN)


@dataclass(frozen=True, slots=True)
class ReusePolicy:
    """What a request accepts in place of its own full prefill. ``str`` gives its written form, which ``parse`` reads.

    level: a word of LEVELS. context: what modules were encoded under, a word of CONTEXTS; None where none are read.
    positions: a word of POSITIONS; None for the best that the model allows, until ``settled``.
    """

    level: str
    context: str | None = None
    positions: str | None = None

    @classmethod
    def parse(cls, reuse: object, positions: object = None) -> ReusePolicy:
        """The policy that is written so. Raises ParameterError."""
        if not isinstance(reuse, str) or reuse not in _WRITTEN:
            raise ParameterError(f"reuse is {show(reuse)}; use one of {', '.join(WORDS)}")
        if positions is None:
            return cls(*_WRITTEN[reuse])
        if not isinstance(positions, str) or positions not in POSITIONS:
            raise ParameterError(f"positions is {show(positions)}; use one of {', '.join(POSITIONS)}")
        return cls(*_WRITTEN[reuse], positions)

    @classmethod
    def named(cls, written: str) -> ReusePolicy | None:
        """The policy that is written so, or None where there is none."""
        return cls(*_WRITTEN[written]) if written in _WRITTEN else None

    @classmethod
    def least(cls, *written: str | None) -> ReusePolicy:
        """The one of these policies that allows the least; None stands for no bound."""
        return min((cls.parse(word) for word in written if word is not None), key=lambda policy: policy._rank)

    @classmethod
    def bounded(cls, asked: ReusePolicy | None, default: ReusePolicy, ceiling: ReusePolicy) -> ReusePolicy | None:
        """What a request gets: what it asks for; where it does not say, the default, or the ceiling where that is less.

        None where it asks for more than the ceiling.
        """
        if asked is not None:
            return asked if asked.within(ceiling) else None
        return default if default.within(ceiling) else ceiling

    def __str__(self) -> str:
        return self.context or self.level

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
    def packed(self) -> bool:
        """Whether everything follows what stands before it, without a gap. Of one that is ``settled``."""
        return self.positions == "packed"

    def within(self, ceiling: ReusePolicy) -> bool:
        """Whether it accepts no more approximation than another one."""
        return self._rank <= ceiling._rank

    def settled(self, why_not_shift: str | None) -> ReusePolicy:
        """This policy with positions. why_not_shift: the reason why a model reads nothing at a shift, or None.

        Raises ParameterError where the model cannot do what is asked.
        """
        if self.modular and self.packed and why_not_shift is not None:
            raise ParameterError(
                f"positions 'packed' with reuse '{self}' reads segments at a shift, which this model does not allow: "
                f"{why_not_shift}; use positions 'schema'"
            )
        if self.positions is not None:
            return self
        return replace(self, positions="schema" if self.modular and why_not_shift is not None else "packed")

    def alone(self) -> ReusePolicy:
        """This policy for a prompt of which everything is computed: it stands where it did, and nothing is reused."""
        return replace(self, level="off", context=None)

    @property
    def _rank(self) -> int:
        return LEVELS.index(self.level)


EXACT = ReusePolicy.parse("exact")

#: What modules are encoded for where nobody says.
BEST = ReusePolicy.parse("modular")


def default_policy(*, modules: bool) -> ReusePolicy:
    """The policy of a request that does not say, on every face (docs/reuse.md).

    modules: whether the request has any: it is of a schema, or marks parts of messages.
    """
    return BEST if modules else EXACT
