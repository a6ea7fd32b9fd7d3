"""Tests and benchmarks use public names only: none that begins with an underscore, in patches neither."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import inlay

SOURCE = Path(inlay.__file__).parent
TESTS = Path(__file__).parents[1]
LAB = TESTS.parent / "lab"
FOLDERS = (TESTS, LAB / "tests", LAB / "benchmarks", LAB / "src/inlay_lab/bench")

#: Private names of other packages without a public equivalent.
OF_OTHERS = {
    "_exit",
    "_attn_implementation",
    "_forward_hooks",
    "_get_alibi_slopes",
    "_local_scalar_dense",
    "_getframe",
    "_repr_html_",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_unique2",
    "_request_id",  # of answers in Anthropic's client
    "_inv_freq",  # the end of the names of rotary buffers
}
#: Strings that are no attributes: the file of our kernel, a field of LongBench, and the variable by which shells ask
#: for completion.
OTHERWISE = {"_kernel", "_id", "_INLAY_COMPLETE"}
#: Methods of strings, whose arguments are text.
OF_TEXT = {"endswith", "removeprefix", "removesuffix", "replace", "startswith"}

_PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def reached(text: str) -> Iterator[str]:
    """Yield the names that a file uses, each with its line: attributes, imports, and names in strings."""
    tree = ast.parse(text)
    own, plain = _own(tree), {node for node in _plain(tree) if isinstance(node, ast.Constant)}
    for node in ast.walk(tree):
        for name in () if node in plain else _names(node, own):
            if _PRIVATE.fullmatch(name) and name not in OF_OTHERS | OTHERWISE:
                yield f"line {node.lineno}: {name}"  # type: ignore[attr-defined]


def _names(node: ast.AST, own: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and node.attr in own):
            yield node.attr
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("inlay", "inlay_lab"):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield _last(node.value)


def _plain(tree: ast.Module) -> Iterator[ast.AST]:
    """The strings that name no attribute: parts of f-strings, operands, and arguments of a string's methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from node.values
        elif isinstance(node, ast.BinOp | ast.Compare):
            yield from _operands(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OF_TEXT:
            yield from node.args


def _operands(node: ast.AST) -> Iterator[ast.AST]:
    """The operands of an operator, also those in tuples and conditions, but none inside a call."""
    for operand in ast.iter_child_nodes(node):
        yield operand
        if isinstance(operand, ast.BinOp | ast.IfExp | ast.Tuple):
            yield from _operands(operand)


def _last(text: str) -> str:
    """The attribute of a dotted name, as patches give it; of any other text itself."""
    return text.rpartition(".")[2] if text.startswith(("inlay.", "inlay_lab.", "tests.", "lab.tests.")) else text


def _own(tree: ast.Module) -> set[str]:
    """The names that the classes of a file define: methods, fields, and attributes of self."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    inside = [node for each in classes for node in ast.walk(each)]
    methods = {node.name for node in inside if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    fields = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assigned = {
        node.attr
        for node in inside
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return methods | fields | assigned


def test_no_private_names_are_used() -> None:
    files = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py")) if path != Path(__file__)]
    assert len(files) > 200
    assert [f"{path.name}, {found}" for path in files for found in reached(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("llm.client.engine._runner.run()", ["_runner"]),
        ("run = engine._runner", ["_runner"]),
        ("engine._pass = None", ["_pass"]),
        ("from inlay_lab.bench.plot import _draw", ["_draw"]),
        ("patch.setattr(engine, '_pass', None)", ["_pass"]),
        ("patch.setattr('inlay.attention.plan._MOST', 0)", ["_MOST"]),
        ("faults.around(engine, 'step', '_pass')", ["_pass"]),
        ("mark.parametrize('step', ['_room', 'take'])", ["_room"]),
        ("class Mine(Engine):\n    def f(self):\n        return self._theirs", ["_theirs"]),
        ("class Mine:\n    def __init__(self):\n        self._own = 1\n    def f(self):\n        return self._own", []),
        ("class Mine:\n    _own: int\n    def f(self):\n        return self._own", []),
        ("getattr(engine, '_pass') == None", ["_pass"]),
        ("engine._count + 1", ["_count"]),
        ("f'{getattr(engine, \"_pass\")}_ms'", ["_pass"]),
        ("name + '_sum' * many in ('_count', f'{name}_ms')", []),
        ("name.removesuffix('_total')", []),
        ("from inlay import __version__\nengine.__class__", []),
        ("model.config._attn_implementation", []),
    ],
)
def test_private_name_is_reported(text: str, found: list[str]) -> None:
    assert [each.rpartition(" ")[2] for each in reached(text)] == found
