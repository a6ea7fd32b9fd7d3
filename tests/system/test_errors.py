"""Errors cross processes: each is the same after it was pickled or copied."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import inlay
from inlay.errors import Place, PMLError, Problem
from inlay.kv.offload.tier import Miss
from inlay.strict_json import JsonFault

_VALUES: dict[str, Any] = {
    "problems": (Problem(Place("file", 1, 2), "a problem"), Problem(Place("file"), "another")),
    "fault": JsonFault.CONSTANT,
    "reason": Miss.LATE,
    "status": 418,
    "bound": 7,
    "index": 3,
    "retry_after_s": 1.5,
    "place": Place("file", 1),
}
_COPIES = {"pickled": lambda error: pickle.loads(pickle.dumps(error)), "copied": copy.copy, "deep": copy.deepcopy}


def error_classes() -> Iterator[type[BaseException]]:
    """Every exception class of the package that takes more than a message."""
    root = Path(inlay.__file__).parent
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if not any(base.endswith(("Error", "Exception")) for base in bases):
                continue
            if "llama_cpp" in path.read_text():  # a peer that benchmarks compare with, which may not be installed
                continue
            module = importlib.import_module(".".join(("inlay", *path.relative_to(root).with_suffix("").parts)))
            found = getattr(module, node.name)
            if issubclass(found, BaseException):
                yield found


@pytest.mark.parametrize("way", _COPIES)
@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_error_survives_pickling_and_copying(kind, way):
    own = "__init__" in vars(kind) or any("__init__" in vars(base) for base in kind.__mro__[1:-3])
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:] if own else []
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    values = {each.name: _VALUES.get(each.name, "a message") for each in named}
    error = kind(**values) if values else kind("a message")
    error.add_note("a note")
    other = _COPIES[way](error)
    assert type(other) is kind
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_the_problems_of_a_wrong_schema_survive():
    with pytest.raises(PMLError) as caught:
        inlay.Schema.from_string('<schema name="s"><module>b</module></schema>')
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)
