"""Schemas and prompts as JSON, for programs that would rather not escape XML: lossless to and from nodes.

Strings are text exactly as they are; there is no white-space rule. See docs/json.md. Importing this imports pydantic,
which reading PML does without.
"""

from inlay.pml.json_models import json_schema
from inlay.pml.json_prompt_reader import read_prompt_json
from inlay.pml.json_schema_reader import read_schema_json
from inlay.pml.json_text import document_from_json
from inlay.pml.json_writer import write_prompt_json, write_schema_json

__all__ = [
    "document_from_json",
    "json_schema",
    "read_prompt_json",
    "read_schema_json",
    "write_prompt_json",
    "write_schema_json",
]
