"""``inlay lint``: says which fields of logged requests break the cache, and how many tokens that costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.explain import LoggedRequest, Row, call_of, diagnose, prompt_processor, quoted, read_requests
from inlay.cli.output import stdout_console
from inlay.diagnostics import CAUSES, MESSAGE, MOVED, TOOLS
from inlay.errors import InlayError, ParameterError
from inlay.wording import counted

if TYPE_CHECKING:
    from inlay.prompt.processor import PromptProcessor

_RATED_TOKENS = 1024  # of the prompt that measures the rate
_NAMED = 5  # tools named in one line

#: Shows tools and messages, for a log without a model.
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
)
_CLOCK = (
    "The chat template writes today's date into conversations, so all prompts change every day. Set template_date, or "
    "the template's own variable in chat_template_kwargs, and write the date into the last message."
)


@dataclass
class _Break:
    """A field that makes requests leave stored prompts.

    Attributes:
        kind: a key of diagnostics.CAUSES.
        tokens: computed tokens behind the changes that stored prompts have, too.
        line: the request of the most expensive change, with the texts around it.
        detail: the difference of the tools; "" for other fields.
    """

    field: str
    kind: str
    requests: int = 0
    tokens: int = 0
    most: int = 0
    line: int = 0
    stored_text: str = ""
    new_text: str = ""
    detail: str = ""

    @property
    def remedy(self) -> str:
        return CAUSES[self.kind][1]

    def add(self, line: int, departure: Row, detail: str) -> None:
        """Count one more change."""
        lost = departure["lost_tokens"]
        self.requests += 1
        self.tokens += lost
        if lost > self.most:
            self.most, self.line, self.detail = lost, line, detail
            self.stored_text, self.new_text = departure["stored_text"], departure["new_text"]


@dataclass(frozen=True, slots=True)
class _LogReport:
    """The result for one log.

    Args:
        rate: prompt tokens that the model computes in a second. None without a model.
        clock: True if the chat template writes the date.
    """

    requests: int
    tokens: int
    cached: int
    breaks: tuple[_Break, ...]
    rate: float | None
    clock: bool

    @property
    def lost(self) -> int:
        return sum(each.tokens for each in self.breaks)

    def seconds(self, tokens: int) -> float | None:
        return None if self.rate is None else tokens / self.rate

    def as_json(self) -> Row:
        rows = [
            {
                **{name: getattr(each, name) for name in ("field", "kind", "tokens", "requests", "line", "detail")},
                "seconds": self.seconds(each.tokens),
                "stored_text": each.stored_text,
                "new_text": each.new_text,
                "remedy": each.remedy,
            }
            for each in self.breaks
        ]
        counts = {"requests": self.requests, "prompt_tokens": self.tokens, "cached_tokens": self.cached}
        rate = {"tokens_per_s": self.rate, "lost_seconds": self.seconds(self.lost)}
        return {**counts, "lost_tokens": self.lost, **rate, "template_writes_date": self.clock, "breaks": rows}


def lint_log(
    log: Annotated[Path, typer.Option(help="Requests as JSON lines, in OpenAI's or Anthropic's form; - for stdin.")],
    model: Annotated[
        str | None,
        typer.Option(help="The model of the requests. Its prefill rate is measured, for the cost in seconds."),
    ] = None,
    path: Annotated[
        str | None, typer.Option(help="The path of the requests, such as /v1/messages, if their fields do not tell it.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 if a field breaks the cache.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of a table.")] = False,
) -> int:
    """Find the fields of logged requests that break the cache: inlay lint --log requests.jsonl --model MODEL.

    Each request is compared with the earlier ones, as a server with one tenant and enough memory would, under the
    policy exact.
    """
    report = _lint(str(log), model, path)
    if as_json:
        print(json.dumps(report.as_json(), ensure_ascii=False))
    else:
        _print(report)
    return 1 if strict and report.breaks else 0


def _lint(file: str, model: str | None, path: str | None) -> _LogReport:
    processor = _processor(model)
    requests = tokens = cached = 0
    tools: Any = None
    breaks: dict[tuple[str, str], _Break] = {}
    for request in read_requests(file, path):
        try:
            call = call_of(request, processor)
            found = [diagnose(prompt, processor) for prompt in call.prompts]
        except InlayError as error:
            raise ParameterError(f"{file}:{request.number}: {error}", code=error.code) from None
        requests += 1
        new_tools = request.body.get("tools")
        for all_tokens, stored, told in found:
            tokens, cached = tokens + all_tokens, cached + stored
            departure = told["departure"]
            if departure is None or not departure["lost_tokens"]:
                continue
            field, kind = _field(request, departure), departure["kind"]
            detail = _difference(tools, new_tools) if kind == TOOLS else ""
            breaks.setdefault((field, kind), _Break(field, kind)).add(request.number, departure, detail)
        tools = new_tools or tools
    ordered = tuple(sorted(breaks.values(), key=lambda each: -each.tokens))
    rate = None if model is None or not ordered else _rate(model)
    return _LogReport(requests, tokens, cached, ordered, rate, processor.template.tells_time)


def _processor(model: str | None) -> PromptProcessor:
    from inlay.models.load import load_tokenizer

    tokenizer = load_tokenizer(model or "demo")
    if model is None:
        tokenizer.chat_template = _TEMPLATE
    return prompt_processor(tokenizer)


def _field(request: LoggedRequest, departure: Row) -> str:
    """Return the field of a request's body that a departure lies in."""
    place, kind = departure["place"], departure["kind"]
    if kind == TOOLS or place == "tools":
        return "tools"
    system = next((name for name in ("system", "instructions") if request.body.get(name)), None)
    if system is not None and place.startswith("messages[0]"):
        blocks = isinstance(request.body[system], list)
        return f"{system}{place.removeprefix('messages[0]').removeprefix('.content')}" if blocks else system
    if kind in (MESSAGE, MOVED) or place.startswith("messages["):
        return place if place.startswith("messages[0]") or system is None else "messages"
    return str(place)


def _difference(before: Any, after: Any) -> str:
    """Return in words how the tools of a request differ from those of the request before it."""
    old, new = _named(before), _named(after)
    if list(old) != list(new) and old.keys() == new.keys():
        return "the same tools in another order"
    groups = {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and old[name] != new[name]],
    }
    told = (
        f"{what} {', '.join(names[:_NAMED])}{' …' if len(names) > _NAMED else ''}"
        for what, names in groups.items()
        if names
    )
    return "; ".join(told) or "the same tools, written in another way"


def _named(tools: Any) -> dict[str, Any]:
    """Return tools of any dialect by name."""
    named = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        named[str(function.get("name"))] = tool
    return named


def _rate(model: str) -> float:
    """Measure how many prompt tokens the model computes in a second. The faster of two runs counts."""
    from inlay import LLM, SamplingParams

    llm = LLM(model)
    try:
        tokens = min(_RATED_TOKENS, llm.processor.model.max_positions - 1)
        ids = [number % min(llm.vocab_size, 256) for number in range(tokens)]
        one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        times = [llm.generate([ids], one, reuse="off")[0].metrics.ttft_s for _ in range(2)]
    finally:
        llm.shutdown()
    return tokens / min(seconds for seconds in times if seconds)


def _print(report: _LogReport) -> None:
    from rich.table import Table
    from rich.text import Text

    print(
        f"{counted(report.requests, 'request')}, {counted(report.tokens, 'prompt token')}, {report.cached:,} of them "
        "cached"
    )
    if report.clock:
        print(_CLOCK)
    if not report.breaks:
        print("no field breaks the cache")
        return
    seconds = report.seconds(report.lost)
    cost = "" if seconds is None else f", {seconds:,.2f} s at {report.rate:,.0f} tokens/s"
    print(f"{counted(report.lost, 'token')} computed again because of changes{cost}\n")
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", *(["seconds"] if report.rate else []), "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("field", "cause"):
        table.add_column(name, no_wrap=True)
    table.add_column("remedy")
    for each in report.breaks:
        own = report.seconds(each.tokens)
        counts = [f"{each.tokens:,}", *([] if own is None else [f"{own:,.2f}"]), f"{each.requests:,}"]
        table.add_row(*counts, Text(each.field), each.kind, Text(each.remedy))
    stdout_console().print(table)
    for line in _examples(report):
        print(line)


def _examples(report: _LogReport) -> Iterator[str]:
    for each in report.breaks:
        yield f"\n{each.field}, request {each.line}: {each.detail or each.kind}"
        if not each.detail:
            yield f"  stored  {quoted(each.stored_text)}"
            yield f"  new     {quoted(each.new_text)}"
