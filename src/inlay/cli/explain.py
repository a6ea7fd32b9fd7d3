"""``inlay explain``: says why prompt tokens are computed, for one request to a server or for the requests of a log."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.cache_source import RunningCache
from inlay.cli.output import stdout_console
from inlay.errors import InlayError, ParameterError
from inlay.wording import counted, printable

if TYPE_CHECKING:
    from inlay.api.call import Call
    from inlay.prompt.processor import PromptProcessor

Row = dict[str, Any]

#: A field of a body → the path of requests with it, in order of precedence.
_PATHS = {
    "messages": "/v1/chat/completions",
    "input": "/v1/responses",
    "prompt": "/v1/completions",
    "pml": "/v1/completions",
}
#: The field for the length of an answer, by path.
_LENGTHS = {"/v1/responses": "max_output_tokens"}
_CONTEXT = 2**31  # tokens: the log was answered, so no prompt is too long


def explain(
    what: Annotated[
        list[str],
        typer.Argument(metavar="[MODEL] FILE", help="With --url: a request as JSON. Else: a model, and a log."),
    ],
    url: Annotated[str | None, typer.Option(help="Send the request to the server at this address.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="INLAY_API_KEY", help="The key of a tenant, for a server with keys.")
    ] = None,
    path: Annotated[str | None, typer.Option(help="The path of the request, if its fields do not tell it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")] = False,
) -> None:
    """Explain why prompt tokens are computed: inlay explain --url URL REQUEST.json, or inlay explain MODEL LOG.jsonl.

    A request is sent with one token as its answer. A log needs no weights: each request is compared with the earlier
    ones, as a server with one tenant and enough memory would, under the policy exact.
    """
    if url is not None:
        if len(what) != 1:
            raise ParameterError("with --url, give one file that holds a request as JSON")
        rows = [_ask(RunningCache(url, api_key), what[0], path)]
    elif len(what) != 2:
        raise ParameterError("give a model and a log, or --url and a request: inlay explain MODEL LOG.jsonl")
    else:
        rows = list(_explained(*what, path=path))
    report = {"requests": rows, "causes": _totals(rows)}
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)


def _ask(server: RunningCache, file: str, path: str | None) -> Row:
    """Send a request with diagnostics. Raises ParameterError."""
    lines = list(read_requests(file, path, whole=True))
    line = lines[0]
    length = _LENGTHS.get(line.path, "max_tokens")
    dropped = ("stream", "stream_options", "max_completion_tokens", "background")
    body = {name: value for name, value in line.body.items() if name not in dropped}
    answer = server.post(line.path, {**body, length: 1, "diagnostics": True})
    found = answer["inlay"].get("diagnostics")
    if found is None:
        raise ParameterError(f"{server.url} gives no diagnostics; see that it is inlay serve of this version")
    usage = answer["inlay"]
    read = usage["exact_tokens"] + usage["module_tokens"]
    return {"line": 1, "tokens": read + usage["computed_tokens"], "cached_tokens": read, "prompts": found}


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A line of a log: its number, and the path and the body of a request."""

    number: int
    path: str
    body: Mapping[str, Any]


def read_requests(file: str, path: str | None, *, whole: bool = False) -> Iterator[LoggedRequest]:
    """Yield the requests of a file: one in the ``whole`` file, or one in each line. Raises ParameterError."""
    try:
        with sys.stdin if file == "-" else open(file, encoding="utf-8-sig") as lines:
            for number, text in enumerate([lines.read()] if whole else lines, start=1):
                if text.strip():
                    yield _request(f"{file}:{number}", number, text, path)
    except UnicodeDecodeError:
        raise ParameterError(f"{file}: is not UTF-8; save it as UTF-8") from None


def _request(place: str, number: int, text: str, path: str | None) -> LoggedRequest:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{place}: this is not JSON ({error}); write one request as a JSON object") from None
    url = None
    if isinstance(value, Mapping) and isinstance(value.get("body"), Mapping):  # a line of a batch
        url, value = value.get("url"), value["body"]
    if isinstance(value, str):
        value = {"prompt": value}
    known = value if isinstance(value, Mapping) else {}
    named = next((path for name, path in _PATHS.items() if known.get(name)), None)
    found = path or url or ("/v1/messages" if named and _is_anthropic(known) else named)
    if not isinstance(found, str):
        raise ParameterError(f"{place}: there is no prompt; write a request with messages, input or prompt")
    return LoggedRequest(number, found, known)


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    """True for messages with a field that OpenAI's chat completions lack."""
    tools = body.get("tools")
    own = isinstance(tools, list) and any(isinstance(tool, Mapping) and "input_schema" in tool for tool in tools)
    return "messages" in body and ("system" in body or own)


def _explained(model: str, file: str, *, path: str | None) -> Iterator[Row]:
    """Yield the diagnostics of each request of a log."""
    from inlay.models.load import load_tokenizer

    requests = read_requests(file, path)
    processor = prompt_processor(load_tokenizer(model))
    for request in requests:
        try:
            call = call_of(request, processor)
            found = [diagnose(prompt, processor) for prompt in call.prompts]
        except InlayError as error:
            raise ParameterError(f"{file}:{request.number}: {error}", code=error.code) from None
        yield {
            "line": request.number,
            "tokens": sum(tokens for tokens, _, _ in found),
            "cached_tokens": sum(cached for _, cached, _ in found),
            "prompts": [told for _, _, told in found],
        }


def prompt_processor(tokenizer: Any) -> PromptProcessor:
    """Return the prompt processor of a tokenizer, without a model."""
    from inlay.kv.identity import KeyMaker
    from inlay.prompt.model_info import ModelInfo
    from inlay.prompt.processor import PromptProcessor

    keys = KeyMaker(b"", "float32", "none", b"", positioned=False)
    return PromptProcessor(tokenizer, ModelInfo(len(tokenizer), _CONTEXT, 0, keys, None))


def call_of(request: LoggedRequest, processor: PromptProcessor) -> Call:
    from inlay.api.dialect import dialect_of
    from inlay.api.reasoning import model_reasoning
    from inlay.api.tools.formats import model_tools

    dialect, tokenizer = dialect_of(request.path), processor.tokenizer
    body = dialect.read(dict(request.body), request.path)
    return dialect.translate(body, tools=model_tools(tokenizer), reasoning=model_reasoning(tokenizer))


def diagnose(prompt: Any, processor: PromptProcessor) -> tuple[int, int, Row]:
    """Return the tokens, the stored tokens and the diagnostics of a prompt. The prompt counts as stored afterwards."""
    from inlay.diagnostics import SpanRead
    from inlay.policy import ReusePolicy
    from inlay.sampling.params import SamplingParams

    policy = ReusePolicy.parse("exact")
    request, noted = processor.process_noted(prompt, SamplingParams(max_tokens=1), policy, diagnostics=True)
    tokens = len(request.ids)
    stored = min(noted.stored_tokens, tokens - 1)
    start, form = request.positions[0], "exact" if stored else "new"
    found = noted.diagnostics(request, [SpanRead(start, tokens, stored, form=form)])
    noted.answered(())
    assert found is not None, "they were requested"
    return tokens, stored, found.told


def _totals(rows: list[Row]) -> list[Row]:
    """Sum the causes of all requests by kind, most expensive first."""
    totals: dict[str, Row] = {}
    for row in rows:
        for cause in (cause for prompt in row["prompts"] for cause in prompt["causes"]):
            known = totals.setdefault(cause["kind"], {**cause, "tokens": 0, "requests": 0})
            known["tokens"] += cause["tokens"]
            known["requests"] += 1
    return sorted(totals.values(), key=lambda cause: -cause["tokens"])


def _print(report: Row) -> None:
    from rich.table import Table
    from rich.text import Text

    rows, console = report["requests"], stdout_console()
    tokens, cached = (sum(row[name] for row in rows) for name in ("tokens", "cached_tokens"))
    print(f"{counted(len(rows), 'request')}, {counted(tokens, 'prompt token')}, {cached:,} of them cached\n")
    if not report["causes"]:
        print("all tokens were stored")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("cause", "place"):
        table.add_column(name, no_wrap=True)
    table.add_column("remedy")
    for cause in report["causes"]:
        counts = (f"{cause[name]:,}" for name in ("tokens", "requests"))
        table.add_row(*counts, cause["kind"], Text(cause["place"]), Text(cause["remedy"]))
    console.print(table)
    for kind, line, departure in _examples(rows):
        print(f"\n{kind}, request {line}, from token {departure['token']:,} on in {departure['place']}")
        print(f"  stored  {quoted(departure['stored_text'])}")
        print(f"  new     {quoted(departure['new_text'])}")
    modules = [module for row in rows for prompt in row["prompts"] for module in prompt["modules"]]
    if modules:
        print()
        console.print(_modules(modules))


def _examples(rows: list[Row]) -> Iterator[tuple[str, int, Row]]:
    """Yield the departure of each kind that loses most tokens, except new text."""
    most: dict[str, tuple[int, Row]] = {}
    for row in rows:
        for departure in (prompt["departure"] for prompt in row["prompts"]):
            if departure is None or not departure["lost_tokens"]:
                continue
            known = most.get(departure["kind"])
            if known is None or departure["lost_tokens"] > known[1]["lost_tokens"]:
                most[departure["kind"]] = row["line"], departure
    for kind, (line, departure) in most.items():
        yield kind, line, departure


def quoted(text: str) -> str:
    """Return a text of a log as JSON without characters that a terminal would interpret."""
    return printable(json.dumps(text, ensure_ascii=False))


def _modules(modules: list[Row]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("module", no_wrap=True)
    for name in ("tokens", "computed", "recomputed", "shift"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("form", "tier", "reason"):
        table.add_column(name, no_wrap=True)
    for each in modules:
        names = ("tokens", "computed_tokens", "recomputed_tokens", "shift")
        counts = (f"{each[name]:,}" for name in names)
        table.add_row(Text(each["name"]), *counts, each["form"], each["tier"], each["reason"])
    return table
