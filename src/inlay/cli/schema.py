"""``inlay schema``: checks, shows and converts schema files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.from_prompts import from_prompts
from inlay.cli.lint import lint
from inlay.cli.options import Plot, Profile, Tokenizer, check_plot, deviations_of
from inlay.cli.output import check_outputs, output_file, told_loading
from inlay.cli.pml_files import kind_of, schema_file
from inlay.errors import ParameterError, PMLError, Problem
from inlay.pml import Module, Param, Prompt, Schema, Text, Turn, Union
from inlay.pml.sources import is_json
from inlay.pml.variables import params_of, template_variables
from inlay.wording import clip, counted

if TYPE_CHECKING:
    from rich.tree import Tree

    from inlay.prompt.layout import SchemaLayout
    from inlay.prompt.tokens import TextEncoder

_FORMS = ("json", "pml")


def convert(
    file: Annotated[Path, typer.Argument(help="A schema or a prompt: JSON if its name ends in .json, else PML.")],
    to: Annotated[
        str | None, typer.Option(help="json or pml; that of --output, or else the other one, if not given.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write it; standard output, if not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
) -> None:
    """Write a schema or a prompt in the other form: PML as JSON, JSON as PML. The text of src files is included."""
    form = _form(file, to, output)
    check_outputs((output,), force)
    document = _read(file)
    text = document.to_json() if form == "json" else document.to_pml()
    if output is None:
        print(text, end="")
    else:
        with output_file(output) as write:
            write(text)


def print_json_schema() -> None:
    """Print the JSON Schema (draft 2020-12) of schemas and prompts in their JSON form."""
    from inlay.pml.json_form import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def _form(file: Path, to: str | None, output: Path | None) -> str:
    if to is None:
        wants_json = not is_json(str(file)) if output is None else is_json(str(output))
        return "json" if wants_json else "pml"
    if to not in _FORMS:
        raise ParameterError(f"--to is '{to}'; use one of {', '.join(_FORMS)}")
    if output is not None and is_json(str(output)) is not (to == "json"):
        remedy = "JSON is read from files whose names end in .json alone, and PML from others"
        raise ParameterError(f"--to is {to} and --output {output}; {remedy}: change one of them")
    return to


def _read(file: Path) -> Schema | Prompt:
    """Parse a schema or a prompt. Errors of other documents are those of a schema."""
    return Prompt.from_file(file) if kind_of(file) == "prompt" else Schema.from_file(file)


app = typer.Typer(help="Check and show schemas.", no_args_is_help=True)
app.command()(lint)
app.command("from-prompts")(from_prompts)
app.command("json-schema")(print_json_schema)
Node = dict[str, Any]


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Schema files (PML or JSON).")], model: Tokenizer = "demo"
) -> int:
    """Check schema files; problems go to stderr with file, line and column. Exit status 1 if there are any.

    Defaults of parameters are counted with the tokenizer of --model. Suspicious text, which may be right, gives a
    warning.
    """
    bad = 0
    encoder: TextEncoder | None = None
    for file in files:
        try:
            schema = schema_file(file)
            if any(param.default is not None or param.scaffold is not None for param in params_of(schema.children)):
                encoder = encoder or _encoder(model)
                _check_fillings(schema, encoder, model)
        except PMLError as error:
            print(error, file=sys.stderr)
            bad += 1
        else:
            for variable in template_variables(schema):
                print(f"{variable.place}: warning: {variable.advice}", file=sys.stderr)
            modules = len(schema.modules)
            print(f"{file}: ok, schema '{schema.name}' with {counted(modules, 'module')}")
    return 1 if bad else 0


def _encoder(model: str) -> TextEncoder:
    """Return the encoder of a model's tokenizer. Loading it takes seconds, and only schemas with defaults need it."""
    with told_loading("the libraries"):
        from inlay.models.load import load_tokenizer
        from inlay.prompt.tokens import TextEncoder

    return TextEncoder(load_tokenizer(model))


def _check_fillings(schema: Schema, encoder: TextEncoder, model: str) -> None:
    """Raise PMLError for defaults and scaffolds that are longer than their len."""
    from inlay.prompt.layout import filling_problems

    counted = f"(tokens of {clip(model)}; --model takes another one)"
    problems = [Problem(each.place, f"{each.message} {counted}") for each in filling_problems(schema, encoder)]
    if problems:
        raise PMLError(problems)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="The schema file (PML or JSON).")],
    model: Tokenizer = "demo",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of a tree.")] = False,
    plot: Plot = None,
    profile: Profile = False,
) -> None:
    """Show the tree of a schema with token counts and position ranges."""
    from inlay.cli.output import stdout_console

    check_plot(plot)
    schema = schema_file(file)
    from inlay.models.load import load_tokenizer
    from inlay.prompt.chat import ChatTemplate
    from inlay.prompt.layout import lay_out_schema
    from inlay.prompt.tokens import TextEncoder

    tokenizer = load_tokenizer(model)
    layout = lay_out_schema(schema, TextEncoder(tokenizer), ChatTemplate(tokenizer))
    if plot is not None:
        from inlay.authoring.plot import draw_layout

        draw_layout(layout, plot)
    tree = _describe(layout)
    if profile:
        _add_deviations(tree, deviations_of([schema], model)[0])
    if as_json:
        print(json.dumps(tree, ensure_ascii=False))
        return

    stdout_console().print(_draw(tree))


def _add_deviations(node: Node, found: dict[str, float]) -> None:
    if node["kind"] == "module" and node["name"] in found:
        node["deviation"] = node["sensitivity"] = round(found[node["name"]], 3)  # the second name for one release
    for child in node["children"]:
        _add_deviations(child, found)


def _describe(layout: SchemaLayout) -> Node:
    children = [node for child in layout.schema.children for node in _node(child, layout)]
    runs = list(layout.runs)
    return {
        "kind": "schema",
        "name": layout.schema.name,
        "tokens": sum(len(run.ids) for run in runs),
        "always_present_tokens": sum(len(run.ids) for run in runs if not run.owner),
        "start": 0,
        "end": layout.length,
        "children": children,
    }


def _node(node: Text | Param | Module | Union | Turn, layout: SchemaLayout) -> list[Node]:
    """Return a node of the tree in a list, or [] if it is empty."""
    if isinstance(node, Text):
        return _text(node, layout)
    if isinstance(node, Param):
        hole = layout.entries[layout.hole_of[node.order]]
        return [_leaf("parameter", node.name, node.length, hole.start)]
    if isinstance(node, Module):
        path = layout.schema.paths[node.order]
        extent = layout.extents[path]
        children = [found for child in node.children for found in _node(child, layout)]
        place = {"tokens": extent.tokens, "start": extent.start, "end": extent.end}
        return [{"kind": "module", "name": path, **place, "children": children}]
    members = node.members if isinstance(node, Union) else node.children
    children = [found for child in members for found in _node(child, layout)]
    if not children:
        return []
    return [
        {
            "kind": "union" if isinstance(node, Union) else node.role,
            "name": "",
            "tokens": sum(map(_tokens, children)),
            "start": min(child["start"] for child in children),
            "end": max(child["end"] for child in children),
            "children": children,
        }
    ]


def _tokens(node: Node) -> int:
    """Return all tokens of a node with its nested modules, which a module's own count leaves out."""
    inside = node["children"] if node["kind"] == "module" else ()
    return int(node["tokens"]) + sum(_tokens(child) for child in inside if child["kind"] in ("module", "union"))


def _text(node: Text, layout: SchemaLayout) -> list[Node]:
    """Return a text node (one part of a run) in a list, or [] if the chat template strips all of it."""
    from inlay.prompt.layout import TextRun

    if node.order not in layout.run_of:
        return []
    run = layout.entries[layout.run_of[node.order]]
    assert isinstance(run, TextRun)
    start = run.start
    for part in run.parts:
        if part.node == node.order:
            return [_leaf("text", " ".join(node.text.split())[:60], len(part.ids), start)]
        start += len(part.ids)
    return []


def _leaf(kind: str, name: str, tokens: int, start: int) -> Node:
    return {"kind": kind, "name": name, "tokens": tokens, "start": start, "end": start + tokens, "children": []}


def _draw(node: Node) -> Tree:
    from rich.markup import escape
    from rich.tree import Tree

    name = f'"{node["name"]}"' if node["kind"] == "text" else node["name"]
    where = f"{node['start']}…{node['end'] - 1}" if node["end"] > node["start"] else "empty"
    label = f"[bold]{node['kind']}[/bold] {escape(name)}".rstrip()
    depends = f", depends on others by {node['deviation']:.2f}" if "deviation" in node else ""
    tree = Tree(f"{label}  [dim]{node['tokens']:,} tokens, positions {where}{depends}[/dim]")
    for child in node["children"]:
        tree.children.append(_draw(child))
    return tree
