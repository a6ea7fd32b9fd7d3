"""Turns a log of prompts into a schema: finds repeated text anywhere, and counts the tokens that the schema saves.

Needs no model and no tokenizer: the caller passes a function that encodes texts.
"""

from inlay.authoring.extract.extraction import Extraction, ExtractionSettings, Saving, extract
from inlay.authoring.extract.log import LogError, LoggedPrompt, LoggedTurn, LogReader
from inlay.authoring.extract.proposal import Proposal
from inlay.authoring.extract.runs import Corpus

__all__ = [
    "Corpus",
    "Extraction",
    "ExtractionSettings",
    "LogError",
    "LogReader",
    "LoggedPrompt",
    "LoggedTurn",
    "Proposal",
    "Saving",
    "extract",
]
