"""PML: schemas and prompts, from text to a resolved list of items. Knows no tokenizer and no model."""

from inlay.pml.nodes import (
    Argument,
    Import,
    Meta,
    Module,
    Param,
    PromptTurn,
    Scaffold,
    Text,
    Turn,
    Union,
    numbered,
)
from inlay.pml.resolve import Filled, Item, NewText, Resolved, SchemaText, TurnEnd, TurnStart, resolve
from inlay.pml.schema import Prompt, PromptBuilder, Schema, use

__all__ = [
    "Argument",
    "Filled",
    "Import",
    "Item",
    "Meta",
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
