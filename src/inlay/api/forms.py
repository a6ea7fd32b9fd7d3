"""The base of all objects in bodies, and the fields that every dialect's body has: sampling and inlay's own.

An error for a wrong value quotes the description of its field. ``null`` means absent in all dialects, and is removed
before these models check a body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic.json_schema import models_json_schema

from inlay.policy import KEY, POSITIONS, WORDS, PolicyFields

MAX_ID = 256  # characters
MAX_TOOLS = 128
MAX_PARTS = 1_024  # of one message
MAX_MESSAGES = 8_192
MAX_STOP = 1_024  # characters of one stop string
MAX_STOPS = 64  # each is searched for after every token
MAX_LOGPROBS = 20
NAME = r"^[A-Za-z0-9_.-]{1,64}$"
NAMED = "letters, digits, _, . and -, at most 64 of them"
WHOLE = "a whole number"
NUMBER = "a number"
SWITCH = "true or false"
TEXT = "a text"
POSITIVE = "a whole number of at least 1"
#: Fields that are lists or objects → the most members. Checked before the members.
LONGEST = {
    "allowed_token_ids": 262_144,
    "bad_words": 256,
    "logit_bias": 16_384,
    "stop_token_ids": 4_096,
    "tools": MAX_TOOLS,
}
#: The form of a mark, by field.
MARKS = {
    "cache_control": '{"type": "ephemeral"}, with or without "ttl": "5m"',
    "prompt_cache_breakpoint": '{"mode": "explicit"}, with or without "ttl": "30m" or "12h"',
}


class StrictForm(BaseModel):
    """Base of all objects: it rejects unknown keys and converts nothing.

    ``inside`` maps a field that holds objects, or a list of objects, to their forms by ``type``. Errors in such objects
    are located by it.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    inside: ClassVar[PartForms] = MappingProxyType({})


#: A field that holds objects → their forms by ``type``.
PartForms = Mapping[str, Mapping[str, type[StrictForm]]]


class CacheControl(StrictForm):
    """Marks a part of a message to keep in the cache, at most for ``ttl``, until the memory is needed."""

    type: Literal["ephemeral"]
    ttl: Annotated[str, Field(max_length=32)] | None = None

    @property
    def mark(self) -> dict[str, Any]:
        """The mark in the form of prompts."""
        return self.model_dump(exclude_none=True)


def _numbers(value: Any) -> Any:
    """Return an object of numbers unchanged. Raises ValueError for any other value in it."""
    if isinstance(value, dict) and not all(type(one) in (int, float) for one in value.values()):
        raise ValueError("not a number")
    return value


class RequestForm(StrictForm):
    """The base of all bodies."""

    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """The request's fields of other servers that have no meaning here."""
        return self._ignored

    model: str | None = Field(None, description=TEXT)


class CommonBody(RequestForm):
    """The fields of every body that asks for answers."""

    seed: int | None = Field(None, description=f"{WHOLE} of 64 bits", ge=-(2**63), lt=2**64)
    temperature: float | None = Field(None, description=NUMBER)
    top_p: float | None = Field(None, description=NUMBER)
    presence_penalty: float | None = Field(None, description=NUMBER)
    frequency_penalty: float | None = Field(None, description=NUMBER)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_numbers)] | None = Field(
        None, description=f"an object of token ids and numbers, at most {LONGEST['logit_bias']:,}"
    )
    stream: bool | None = Field(None, description=SWITCH)
    # vLLM's
    top_k: int | None = Field(None, description=f"{WHOLE} from -1 to {2**31 - 1}", ge=-1, lt=2**31)
    min_p: float | None = Field(None, description=NUMBER)
    typical_p: float | None = Field(None, description=NUMBER)
    repetition_penalty: float | None = Field(None, description=f"{NUMBER} from 0.01 to 100", ge=0.01, le=100)
    min_tokens: int | None = Field(None, description=WHOLE)
    ignore_eos: bool | None = Field(None, description=SWITCH)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=LONGEST["stop_token_ids"])] | None = Field(
        None, description=f"a list of token ids, at most {LONGEST['stop_token_ids']:,}"
    )
    skip_special_tokens: bool | None = Field(None, description=SWITCH)
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=LONGEST["bad_words"])] | None = Field(
        None, description=f"a list of texts, at most {LONGEST['bad_words']}"
    )
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=LONGEST["allowed_token_ids"])] | None = (
        Field(None, description=f"a list of token ids, at most {LONGEST['allowed_token_ids']:,}")
    )
    truncate_prompt_tokens: int | None = Field(None, description=f"{WHOLE} of at least 1, or -1", ge=-1)
    priority: int | None = Field(None, description=f"{WHOLE} of 32 bits; lower goes first", ge=-(2**31), lt=2**31)
    # inlay's own
    reuse: str | None = Field(None, description=PolicyFields.help("reuse"))
    recompute: str | None = Field(None, description=PolicyFields.help("recompute"))
    promote: bool | None = Field(None, description=f"{SWITCH}; {PolicyFields.help('promote')}")
    across_adapters: bool | None = Field(None, description=f"{SWITCH}; {PolicyFields.help('across_adapters')}")
    tolerance: float | str | None = Field(None, description=PolicyFields.help("tolerance"))
    find: str | None = Field(None, description=PolicyFields.help("find"))
    positions: str | None = Field(None, description="schema or packed")
    order: Literal["any"] | None = Field(
        None, description='"any" where neighbouring modules, or marked parts of a message, may change places'
    )
    diagnostics: bool | None = Field(None, description=f"{SWITCH}; if true, the answer says why tokens were computed")


STRING = {"type": "string"}
INTEGER = {"type": "integer", "minimum": 0}


def of_object(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of an object that requires these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def described(
    bodies: Sequence[type[CommonBody]],
    names: Sequence[str],
    *,
    no_effect: Iterable[str],
    ignored: Mapping[str, str],
    prefix: str = "",
    others: Iterable[type[StrictForm]] = (),
) -> dict[str, Any]:
    """Return the schemas of bodies and their parts, by name.

    The bodies include the fields without effect and the served model's names.

    Args:
        bodies: the forms of bodies.
        names: of the served model.
        no_effect: accepted fields without effect.
        ignored: ignored fields → the servers that have them.
        prefix: of the schemas' names, because dialects have forms of the same name.
        others: forms that the bodies do not mention.
    """
    ref = f"#/components/schemas/{prefix}{{model}}"
    _, made = models_json_schema([(form, "validation") for form in (*bodies, *others)], ref_template=ref)
    words = {"model": names, "reuse": WORDS, "positions": POSITIONS}
    schemas: dict[str, Any] = made["$defs"]
    for body in bodies:
        fields = schemas[body.__name__]["properties"]
        fields.update({field: {"description": "Accepted, and without effect."} for field in no_effect})
        foreign = {field: known for field, known in ignored.items() if field not in fields}
        fields.update({field: {"description": f"Of {known}; ignored."} for field, known in foreign.items()})
        for field, allowed in words.items():
            fields[field]["anyOf"] = [{"enum": list(allowed)}, {"type": "null"}]
        fields["reuse"]["anyOf"].append({"type": "string", "pattern": KEY})
    return {f"{prefix}{name}": schema for name, schema in schemas.items()}
