"""Describes the bodies of dialects for the OpenAPI document. Routes read bodies themselves, so FastAPI cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from inlay.api.forms import CommonBody, StrictForm
from inlay.policy import KEY, POSITIONS, WORDS

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
