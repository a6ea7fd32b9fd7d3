"""From a log of prompts to a schema: finds text that repeats, anywhere, and counts what a schema of it saves.

Knows neither models nor tokenizers: whoever calls gives a function that encodes texts.
"""

from inlay.extract.corpus import Corpus
from inlay.extract.extraction import Extraction, Settings, extract
from inlay.extract.log import LogError, LoggedPrompt, LoggedTurn, LogReader
from inlay.extract.proposal import Proposal
from inlay.extract.saving import Saving

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
