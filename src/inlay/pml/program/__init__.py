"""Prompt programs: a typed Python function that yields text is a schema, and a call of it is a prompt.

``decorator.py`` is the table of contents: ``source`` and ``signature`` read the function, ``grammar`` refuses what it
may not contain, ``translate`` evaluates it in part, ``build`` names the modules and picks those that a call imports.
"""

from inlay.pml.program.build import Program, ProgramPrompt, assistant, system, user
from inlay.pml.program.decorator import program
from inlay.pml.program.inputs import Length

__all__ = ["Length", "Program", "ProgramPrompt", "assistant", "program", "system", "user"]
