"""The diagnostics of a request: the source of each module, and the causes of computed prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

TEMPLATE_DATE, DATE, SYSTEM = "template date", "date or number", "changed system text"
TOOLS, MOVED = "tool set", "moved document"
THINKING, MESSAGE = "dropped thinking", "changed message"
EVICTED, EXPIRED, ADAPTER, POLICY = "evicted", "expired", "other adapter", "policy"
STATE, NEW = "between states", "new"

_REPLICA = "Free memory of the host or the disk, or wait a little, and send the request again."

#: Kind of cause → its message and its remedy. Beside these kinds, it has the reasons of misses (types.MISS_REASONS).
CAUSES: Mapping[str, tuple[str, str]] = {
    TEMPLATE_DATE: (
        "The chat template has written another date or number than into a stored prompt.",
        "Set template_date, or give the template's own variable in chat_template_kwargs. Write the date into the last "
        "message.",
    ),
    DATE: (
        "Only digits or names of days and months differ from a stored prompt, in front of the rest.",
        "Put the date or number behind the marked part, or into the last message.",
    ),
    SYSTEM: (
        "The system text differs from that of a stored prompt.",
        "Keep the system text the same. Write changing text into the last message.",
    ),
    TOOLS: (
        "The tools, or their order, differ from those of a stored prompt.",
        "Send the same tools in the same order with every request. Restrict their use with tool_choice.",
    ),
    MOVED: (
        "Text of a stored prompt stands in another place.",
        "Keep the order of the documents, or mark each document with cache_control so that it is a module.",
    ),
    THINKING: (
        "A stored prompt or answer has reasoning that this prompt leaves out.",
        "Send the reasoning back with the message, or switch it off.",
    ),
    MESSAGE: (
        "Text in front of stored text differs from a stored prompt.",
        "Append to a conversation. Do not edit its earlier messages.",
    ),
    EVICTED: (
        "The text was stored, and made room for other text.",
        "Give the engine more kv_memory or a host or disk tier, or pin the schema.",
    ),
    EXPIRED: (
        "The lifetime of the stored text is over.",
        "Use a longer ttl.",
    ),
    ADAPTER: (
        "The text is stored for another adapter.",
        "Use one adapter for these requests, or allow across_adapters for modules.",
    ),
    POLICY: (
        "The reuse policy of this request, or of the earlier one, keeps the text out of the cache.",
        "Send all these requests with the same reuse, and not with off.",
    ),
    STATE: (
        "The model has recurrent layers. It reads a prefix only up to a stored state.",
        "End the shared text with a marked part, because a state is stored there.",
    ),
    NEW: (
        "No stored prompt has this text.",
        "Nothing is lost: text is computed once.",
    ),
    "late": (
        "Reading the text from a lower tier took too long.",
        "Use faster storage, or a longer fetch timeout.",
    ),
    "corrupt": (
        "The stored file of the text was damaged.",
        "Run inlay cache verify.",
    ),
    "failed": (
        "The system or the shared store refused the read.",
        _REPLICA,
    ),
    "other model": (
        "The text is stored for another model.",
        "Compute it once for this model, for example with inlay cache warm.",
    ),
    "other version": (
        "The text is stored by another version of the numerics.",
        "Compute it once with this version, for example with inlay cache warm.",
    ),
    "other codec": (
        "The text is stored with another codec.",
        "Use the same store codec and KV dtype on all servers of one store.",
    ),
    "other salt": (
        "The text is stored under another cache_salt.",
        "Use one cache_salt for requests that may share text.",
    ),
    "other context": (
        "The text is stored behind other text.",
        "Keep the text in front of the modules the same, or use reuse isolated.",
    ),
}


@dataclass(frozen=True, slots=True)
class SpanRead:
    """The source of consecutive prompt tokens, as the engine reports it.

    Args:
        start: the position of the first token in the prompt.
        tokens: their number.
        cached: the number of tokens that were read from the store, from the first one on.
        recomputed: tokens that selective recomputation replaces, as distances from ``start``. A read with these has no
            other tokens.
        module: True for a segment of a module.
        form: exact, new, or the form of the segment (prompt.request.FORMS).
        tier: pool, host, disk or shared; "" if nothing was read.
        shift: how far the segment was moved from its encoding, in positions.
        reason: the reason for a miss (types.MISS_REASONS); "" for none.
        kept: True if the tokens may be stored and found.
    """

    start: int
    tokens: int
    cached: int
    module: bool = False
    form: str = NEW
    tier: str = ""
    shift: int = 0
    reason: str = ""
    kept: bool = True
    recomputed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleRead:
    """The source of one module of a prompt.

    Args:
        name: the path of a schema's module, or the place of a part, such as ``messages[1].content[0]``.
        tokens: its tokens in the prompt.
        form: exact, anchored, reanchored, primed, isolated, scaffold, or new for a computed module.
        tier: where it was read from: pool, host, disk or shared. "" if it was computed.
        shift: how far it was moved from its encoding, in positions.
        computed_tokens: tokens that were computed, because they were missing.
        recomputed_tokens: tokens that selective recomputation computed again.
        reason: the reason for the miss (types.MISS_REASONS). "" if nothing was missing.
    """

    name: str
    tokens: int
    form: str
    tier: str = ""
    shift: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Departure:
    """The place at which a prompt differs from the nearest stored prompt of the same salt.

    Args:
        token: the number of the first token that differs.
        place: the message, part or module of that token, or ``tools`` or ``template``.
        stored_text: about 40 characters of the stored prompt around it.
        new_text: about 40 characters of this prompt around it.
        lost_tokens: computed tokens behind it that the stored prompt has, too.
        kind: the kind of cause (CAUSES).
    """

    token: int
    place: str
    stored_text: str
    new_text: str
    lost_tokens: int
    kind: str


@dataclass(frozen=True, slots=True)
class Cause:
    """Why some prompt tokens were computed.

    Args:
        kind: a key of CAUSES.
        tokens: the computed tokens.
        place: the first message, part or module with such tokens.
    """

    kind: str
    tokens: int
    place: str

    @property
    def message(self) -> str:
        """The cause, in one sentence."""
        return CAUSES[self.kind][0]

    @property
    def remedy(self) -> str:
        """The remedy, in one or two sentences."""
        return CAUSES[self.kind][1]

    @property
    def told(self) -> dict[str, Any]:
        """The JSON form."""
        return {**asdict(self), "message": self.message, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """The diagnostics of one prompt.

    Args:
        modules: its modules, in the order of the prompt.
        departure: None if the prompt begins with, or is the beginning of, the nearest stored prompt.
        causes: the causes of its computed tokens, most expensive first.
    """

    modules: tuple[ModuleRead, ...] = ()
    departure: Departure | None = None
    causes: tuple[Cause, ...] = ()

    @property
    def told(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "modules": [asdict(module) for module in self.modules],
            "departure": None if self.departure is None else asdict(self.departure),
            "causes": [cause.told for cause in self.causes],
        }
