"""``python -m inlay``."""

from inlay.cli.main import entry

entry()
