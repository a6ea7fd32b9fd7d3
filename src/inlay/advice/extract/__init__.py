"""From a log of prompts to a schema: finds text that repeats, anywhere, and counts what a schema of it saves.

Knows neither models nor tokenizers: whoever calls gives a function that encodes texts.
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
