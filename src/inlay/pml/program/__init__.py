"""Prompt programs: a typed Python function that yields text is a schema, and a call of it is a prompt.

``decorator`` is the table of contents: ``source`` reads the function and refuses what it may not contain, ``inputs``
reads its arguments, ``translate`` evaluates it in part along ``paths``, with the ``values`` of expressions and what
``constants`` may do. What comes out hangs on ``cases``; ``decorator`` makes modules of it, and ``runtime`` picks those
that a call imports.
"""

from inlay.pml.program.decorator import program
from inlay.pml.program.inputs import Length
from inlay.pml.program.runtime import Program, ProgramPrompt, assistant, system, user

__all__ = ["Length", "Program", "ProgramPrompt", "assistant", "program", "system", "user"]
