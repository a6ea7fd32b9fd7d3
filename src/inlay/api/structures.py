"""Translates the engine's error for an impossible grammar into the request's terms."""

from __future__ import annotations

from inlay.api.call import Call
from inlay.api.failures import BodyError
from inlay.api.tools.schema import call_failure
from inlay.errors import StructureError
from inlay.sampling.json_schemas import place_of


def structure_failure(call: Call, error: StructureError) -> BodyError:
    """Return the error for the client. It names the field and the place in its schema."""
    if not error.reason:  # it came from another process
        return BodyError(str(error).rstrip("."), param=call.structure_field)
    schema = (call.params.structured_outputs or {}).get("json")
    if call.tools is not None and call.tools.held and schema is not None:
        return call_failure(error, schema)
    at = f"at {place_of(error.place)}, " if error.place else ""
    kind = next(iter(call.params.structured_outputs or ()), "json")
    field = f"structured_outputs['{kind}']" if call.structure_field == "structured_outputs" else call.structure_field
    return BodyError(f"{field} cannot be used: {at}{error.reason}", param=call.structure_field)
