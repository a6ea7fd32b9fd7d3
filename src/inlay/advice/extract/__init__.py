"""Turns a log of prompts into a schema: finds repeated text anywhere, and counts the tokens that the schema saves.

Needs no model and no tokenizer: the caller passes a function that encodes texts.
"""

from inlay.advice.extract.corpus import Corpus
from inlay.advice.extract.extraction import Extraction, Settings, extract
from inlay.advice.extract.log import LogError, LoggedPrompt, LoggedTurn, LogReader
from inlay.advice.extract.proposal import Proposal
from inlay.advice.extract.saving import Saving

__all__ = [
    "Corpus",
    "Extraction",
    "LogError",
    "LogReader",
    "LoggedPrompt",
    "LoggedTurn",
    "Proposal",
    "Saving",
    "Settings",
    "extract",
]
