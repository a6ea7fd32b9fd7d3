"""``inlay run``: answers one prompt of a schema, or one question about text files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from inlay.cli.documents import SCHEMA_SUFFIXES, DocumentChat, is_schema, plain_text, read_documents
from inlay.cli.options import announce_hub
from inlay.cli.pml_files import prompt_file, schema_file, standard_input
from inlay.cli.settings import Options, with_settings
from inlay.errors import ContextError, ParameterError
from inlay.pml import Prompt, resolve
from inlay.settings import RUN
from inlay.wording import clip, printable

if TYPE_CHECKING:
    from inlay.client.llm import LLM
    from inlay.policy import ReusePolicy
    from inlay.sampling.params import SamplingParams
    from inlay.types import RequestOutput

Row = dict[str, Any]

#: The counts of Usage in the result. Rare ones are left out where they are 0.
_RARE = ("reanchored_tokens", "primed_tokens", "moved_tokens", "found_tokens")
_COUNTS = (
    *("prompt_tokens", "cached_tokens", "computed_tokens", "exact_tokens", "module_tokens"),
    *("scaffold_tokens", "anchored_tokens", "isolated_tokens", *_RARE, "promoted_tokens", "shifted_tokens"),
    *("recomputed_tokens", "linked_tokens", "selecting_tokens", "drafted_tokens", "accepted_tokens"),
)


@with_settings(RUN)
def run(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCHEMA|MODEL",
            help="A schema file that exists (.xml, .json or .py), or any file beside --prompt. Everything else is a "
            "model: a directory, a GGUF file, a hub name, random:<shape>, or demo.",
        ),
    ],
    question: Annotated[
        str | None,
        typer.Argument(help="With a model: the question, or - for standard input, which is read if none is given."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", help="With a schema: the prompt file (PML or JSON), or - for standard input."),
    ] = None,
    document: Annotated[
        list[str] | None,
        typer.Option("--document", metavar="FILE", help="With a model: a text file before the question; repeatable."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Answer without reuse as well, and show both.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of text.")] = False,
    *,
    options: Options,
) -> None:
    """Answer a prompt of a schema, or a question about text files, and show cached tokens and times.

    inlay run SCHEMA --prompt FILE [--model MODEL] reads modules of the schema. inlay run MODEL QUESTION asks a model,
    and shows cached tokens and times on stderr. With adapters, each adapter answers, one after the other.
    """
    options.check()
    echo: Callable[[str], None] | None = None if as_json else _write
    asked: Prompt | list[dict[str, Any]]
    if prompt is not None or is_schema(source):
        llm, asked = _of_schema(source, question, prompt, document, options)
    else:
        llm, asked = _of_model(source, question, document, options)
    names: list[str | None] = [*options.adapters()] or [None]
    params = options.sampling(llm)
    try:
        rows = [_row(llm, asked, params, name, echo, compare=compare) for name in names]
    except ContextError as error:
        if not document:
            raise
        raise ContextError(f"{error}; {_largest(document)}", code=error.code) from error
    if as_json:
        print(json.dumps(rows[0] | ({"adapters": rows[1:]} if len(rows) > 1 else {}), ensure_ascii=False))
    elif isinstance(asked, Prompt):
        print("\n")
        _table(rows, sys.stdout)
    else:
        print(flush=True)
        _table(rows, sys.stderr)
    llm.shutdown()  # waits for outstanding writes


def _largest(patterns: Sequence[str]) -> str:
    """Return a remedy for documents that exceed the context. It names the largest one."""
    found = read_documents(patterns)
    largest = max(found, key=lambda one: len(one.text))
    if len(found) == 1:
        return f"cut --document {largest.path}, or the question"
    return f"give fewer of the {len(found)} documents, of which --document {largest.path} is the largest"


def _of_schema(
    schema: str,
    question: str | None,
    prompt: str | None,
    document: Sequence[str] | None,
    options: Options,
) -> tuple[LLM, Prompt]:
    """Load a model for a prompt of a schema. Raises InlayError, for mistakes in the prompt before the model loads."""
    if prompt is None:
        raise ParameterError(
            f"{schema} is taken as a schema; name its prompt with --prompt FILE, or give a model to ask a question"
        )
    for name, value in (("a question", question), ("--document", document)):
        if value:
            raise ParameterError(
                f"{schema} is taken as a schema, and {name} belongs to a model; write both into the prompt, or give a "
                "model in the schema's place"
            )
    parsed_schema, parsed_prompt = schema_file(Path(schema)), prompt_file(prompt)
    resolve(parsed_schema, parsed_prompt, moves=True)  # errors are reported before a model is loaded
    llm = options.load_llm(announce_hub(options["model"]))
    llm.add_schema(parsed_schema, encode=False)
    return llm, parsed_prompt


def _of_model(
    model: str,
    question: str | None,
    document: Sequence[str] | None,
    options: Options,
) -> tuple[LLM, list[dict[str, Any]]]:
    """Load a model for a question about documents. Raises InlayError, for wrong documents before the model loads."""
    if options.flag("model") is not None:
        raise ParameterError(
            f"{clip(model)} is taken as a model, because it is no schema file, and --model names another one; leave "
            "--model out, or give a schema and its --prompt"
        )
    if model.endswith(SCHEMA_SUFFIXES) and not Path(model).exists():
        raise ParameterError(f"{model}: no such file; check the path of the schema, or give a model")
    conversation = DocumentChat()
    conversation.add(read_documents(document or ()))
    if question is None and sys.stdin.isatty():
        raise ParameterError(
            f"{clip(model)} is taken as a model, and there is no question; write it behind the model, or talk to it "
            f"with inlay chat {clip(model)}"
        )
    text = standard_input().rstrip("\r\n") if question in (None, "-") else question
    if not text:
        raise ParameterError("the question is empty; write it behind the model, or send it to standard input")
    llm = options.load_llm(announce_hub(model))
    if told := plain_text(llm):
        print(f"inlay: {told}", file=sys.stderr)
    return llm, conversation.messages(conversation.next(text))


def _row(
    llm: LLM,
    prompt: Prompt | list[dict[str, Any]],
    params: SamplingParams,
    adapter: str | None,
    echo: Callable[[str], None] | None,
    *,
    compare: bool,
) -> Row:
    """Return the answer of an adapter, or of the model alone, with its cost."""
    before = llm.stats()
    encode_ms = _warm(llm, prompt, adapter)
    if echo and adapter is not None:
        echo(f"\n— {adapter} —\n")
    row = _answer(llm, prompt, params, llm.policy_for(prompt, adapter=adapter), adapter, echo)
    stats = llm.stats()
    tiers, left = {}, row["cached_tokens"]
    for name in ("host", "disk", "shared"):
        read = getattr(stats, f"{name}_tokens") - getattr(before, f"{name}_tokens")
        tiers[name] = min(read, left)
        left -= tiers[name]
    there = {"disk": True, "host": stats.host is not None, "shared": stats.shared is not None}
    row |= {
        "encode_ms": encode_ms,
        "encoded_tokens": stats.encoded_tokens - before.encoded_tokens,
        "tiers": {"device": left} | {name: tokens for name, tokens in tiers.items() if there[name]},
    }
    if compare:
        if echo:
            echo("\n\n— without reuse —\n")
        row["baseline"] = _answer(llm, prompt, params, llm.policy("off", "packed"), adapter, echo)
    if echo and adapter is not None:
        echo("\n")
    return row


def _warm(llm: LLM, prompt: Prompt | list[dict[str, Any]], adapter: str | None) -> float:
    """Encode the prompt's imports with progress; returns the time in milliseconds."""
    from inlay.cli.output import token_progress

    started = time.perf_counter()
    with token_progress("encoding modules") as progress:
        llm.warm(prompt, progress=progress, adapter=adapter)
    return round((time.perf_counter() - started) * 1000, 2)


def _answer(
    llm: LLM,
    prompt: Prompt | list[dict[str, Any]],
    params: SamplingParams,
    policy: ReusePolicy,
    adapter: str | None,
    echo: Callable[[str], None] | None,
) -> Row:
    said = ""
    output: RequestOutput | None = None
    for output in llm.stream(prompt, params, reuse=policy, positions=policy.positions, adapter=adapter):
        text = output.outputs[0].text
        if echo is not None:
            echo(text[len(said) :])
        said = text
    if output is None or output.metrics.ttft_s is None:
        raise ParameterError("the model gave no token")
    answer = output.outputs[0]
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        **{name: count for name in _COUNTS if (count := getattr(output.usage, name)) or name not in _RARE},
        "ttft_ms": round(output.metrics.ttft_s * 1000, 2),
        "model": llm.model_name,
        **({} if adapter is None else {"adapter": adapter, "across_tokens": output.usage.across_tokens}),
        "reuse": str(policy),
        "positions": policy.positions,
        **({"order": [each.told for each in output.order]} if output.order else {}),
    }


def _unprofiled(answer: Row) -> str:
    """Note the first tokens that were recomputed for lack of profiles."""
    linked = answer["linked_tokens"] if "profiled" in answer["reuse"] else 0
    return f", of which {linked:,} are the first ones of modules that have no profile yet" if linked else ""


def _how(answer: Row) -> str:
    from inlay.policy import ReusePolicy

    return f"{ReusePolicy.parse(answer['reuse']).in_words()}, {answer['positions']}"


def _why(order: Row) -> str:
    return f"; it was not free: {order['why_fixed']}" if "why_fixed" in order else ""


def _write(text: str) -> None:
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _table(answers: Sequence[Row], stream: TextIO) -> None:
    from rich.table import Table

    from inlay.cli.output import console_of

    table = Table(box=None, pad_edge=False)
    rows = [row for answer in answers for row in (answer, answer.get("baseline")) if row is not None]
    table.add_column("reuse, positions")  # a long policy takes several lines
    for name in ("tokens cached", "tokens computed", "time to first token"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in rows:
        cells = (each["cached_tokens"], each["computed_tokens"])
        table.add_row(
            f"{each['adapter'] + ': ' if 'adapter' in each else ''}{_how(each)}",
            *(f"{cell:,}" for cell in cells),
            f"{each['ttft_ms']:,.1f} ms",
        )
    console_of(stream).print(table, markup=False)
    for each in answers:
        if each["recomputed_tokens"]:
            print(f"(recomputed: {each['recomputed_tokens']:,} tokens of modules{_unprofiled(each)})", file=stream)
    for each in answers[0].get("order", ()):
        print(f"(order: {', '.join(each['members'])}{_why(each)})", file=stream)
    encode_ms = sum(row["encode_ms"] for row in answers)
    if encode_ms >= 0.05 and any(row["encoded_tokens"] or any(row["tiers"].values()) for row in answers):
        encoded = any(row["encoded_tokens"] or not row["tiers"]["disk"] for row in answers)
        how = "encoded once" if encoded else "read from the store"
        print(f"(its modules were {how}, before the request, in {encode_ms:,.1f} ms)", file=stream)
