"""PML: schemas and prompts, from text to a resolved list of items. Knows no tokenizer and no model."""

from inlay.pml.builder import PromptBuilder, use
from inlay.pml.items import Filled, Item, NewText, Resolved, SchemaText, TurnEnd, TurnStart
from inlay.pml.nodes import (
    Argument,
    Import,
    Module,
    Param,
    PromptTurn,
    Scaffold,
    Text,
    Turn,
    Union,
    numbered,
)
from inlay.pml.prompt import Prompt
from inlay.pml.resolve import resolve
from inlay.pml.schema import Schema

__all__ = [
    "Argument",
    "Filled",
    "Import",
    "Item",
    "Module",
    "NewText",
    "Param",
    "Prompt",
    "PromptBuilder",
    "PromptTurn",
    "Resolved",
    "Scaffold",
    "Schema",
    "SchemaText",
    "Text",
    "Turn",
    "TurnEnd",
    "TurnStart",
    "Union",
    "numbered",
    "resolve",
    "use",
]
