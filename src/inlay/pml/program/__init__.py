"""Prompt programs: a typed Python function that yields text is a schema, and a call of it is a prompt.

``decorator`` is the entry point. ``source`` reads the function and checks its grammar, and ``inputs`` reads its
arguments. ``translate`` evaluates the function partially along ``paths``. ``values`` evaluates its expressions by the
rules in ``constants``. ``cases`` describes the conditions of each piece. ``decorator`` turns the pieces into modules,
and ``runtime`` picks the modules that a call imports.
"""

from inlay.pml.program.decorator import program
from inlay.pml.program.inputs import Length
from inlay.pml.program.runtime import Program, ProgramPrompt, assistant, system, user

__all__ = ["Length", "Program", "ProgramPrompt", "assistant", "program", "system", "user"]
