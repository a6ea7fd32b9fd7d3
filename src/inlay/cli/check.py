"""``inlay check``: measures reuse policies on a model and prompts, and recommends one."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import AcrossAdapters, Promote, Recompute, announce_hub, policy_of, words
from inlay.cli.output import told_loading
from inlay.cli.pml_files import schema_file
from inlay.cli.settings import Options, with_settings
from inlay.errors import ParameterError, PolicyError
from inlay.pml import Prompt, Schema, resolve
from inlay.policy import ReusePolicy
from inlay.prompt.inputs import Conversation, check_messages, has_modules, is_conversation
from inlay.settings import CHECK
from inlay.strict_json import JSONError, read_json
from inlay.tolerance import DEFAULT, Tolerance
from inlay.wording import clip

if TYPE_CHECKING:
    from inlay.check.run import Check
    from inlay.client.llm import LLM

_MOST_PROMPTS = 10_000


@with_settings(CHECK)
def check(
    model: Annotated[
        str,
        typer.Argument(help="A directory, a GGUF file, a hub name, random:<shape>, or demo.", callback=announce_hub),
    ],
    schema: Annotated[
        Path | None, typer.Option(help="Your schema (PML or JSON); generated ones of several kinds, if not given.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts, one on each line. With --schema: PML in a JSON string, or a prompt in its JSON form. "
            'Without: chat requests with marked parts, {"messages": […]}. Generated ones, if not given.'
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Keys of reuse policies to compare, as results show them, with commas. A choice, if not given."
        ),
    ] = None,
    reuse: Annotated[
        str | None, typer.Option(help="Compare this policy, with the following options, in place of or beside those.")
    ] = None,
    recompute: Recompute = None,
    promote: Promote = None,
    across_adapters: AcrossAdapters = None,
    tolerance: Annotated[
        str,
        typer.Option(help="Of the recommendation: nats a token, or answers:0.98 for the least share of same answers."),
    ] = str(DEFAULT),
    quick: Annotated[
        bool, typer.Option("--quick", help="Few and short prompts, three policies: a first look.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="The longest time to compare; then what was measured is shown.")
    ] = 300.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print lines of JSON in place of tables; the last one is the result.")
    ] = False,
    *,
    options: Options,
) -> None:
    """Compare reuse policies with full prefill on a model itself, and recommend one.

    The results are kept for the policy 'auto' (docs/guides/check-prompts.md).
    """
    within = Tolerance.parse(tolerance, f"--tolerance {clip(tolerance)}")
    policy = policy_of(reuse, recompute, promote, across_adapters)
    named = (*(() if against is None else _keys(against)), *(() if policy is None else (str(policy),)))
    if not 0 < seconds < 86_400 * 7:
        raise ParameterError(f"--seconds is {seconds:g}; it must be above 0 and at most a week")
    asked = None if schema is None else schema_file(schema)
    given = None if prompts is None else prompts_file(prompts, asked)
    from inlay.cli.output import token_progress

    with told_loading("the libraries"):
        from inlay.check.run import CheckSetting, check_model
        from inlay.client.llm import LLM
        from inlay.measured import Measurements

    setting = CheckSetting(
        against=named or None,
        schema=asked,
        prompts=given,
        quick=quick,
        seconds=min(seconds, 60.0) if quick else seconds,
        tolerance=within,
        seed=options["seed"],
    )
    with told_loading(f"the model {clip(model)}"):
        # without promotion, to measure modules as they are encoded
        chosen = options.llm_settings(model)
        llm = LLM(model, **chosen, promotion_memory=0, store="off", generation_config="off")
    if llm.client.model.why_limited is not None:
        raise ParameterError(f"there is nothing to check: {llm.client.model.why_limited}")
    if llm.loaded.note:
        print(f"inlay: {llm.loaded.note}", file=sys.stderr)
    about = _about(llm)
    if not as_json:
        _print_about(about)
    with token_progress("comparing answers") as progress, _termination_interrupts():
        found = check_model(llm, setting, progress)
    compared = sum(count for count, _ in found.kinds.values())
    if given is not None and compared < len(given):
        told = f"{compared:,} of {len(given):,} prompts were compared in {setting.seconds:g} seconds"
        print(f"inlay: {told}; --seconds gives them more time", file=sys.stderr)
    if found.missing:
        print(f"inlay: no time was left to compare {', '.join(found.missing)}", file=sys.stderr)
    measurements = Measurements.of(llm.client.model.measured_as(None))
    if measurements.problem is not None:
        print(f"inlay: {measurements.problem}", file=sys.stderr)
    little = "--quick asks too little of generated prompts to go by; leave it out"
    partial = "it ended before every policy was compared on every kind of prompt; give --seconds more"
    if found.interrupted:
        problem: str | None = "it was interrupted; these are the measurements so far"
    elif not found.complete:
        problem = little if quick and asked is None else partial
    else:
        problem = little if quick and asked is None else measurements.keep(asked, found.rows)
    if problem is not None:
        print(f"inlay: 'auto' will not know of this: {problem}", file=sys.stderr)
    about |= {
        "kinds": {kind: {"prompts": count, "schemas": schemas} for kind, (count, schemas) in found.kinds.items()},
        "refused": [{"policy": one.policy, "positions": one.positions, "reason": one.reason} for one in found.refused],
        "only_distributions": found.meaningless,
        "kept": None if problem is not None else str(measurements.path),
    }
    if as_json:
        print(json.dumps(about, ensure_ascii=False))
        print(json.dumps(found.as_json(), ensure_ascii=False))
    else:
        _print_found(found, about)
    if found.interrupted:
        raise typer.Exit(130)


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt in the block, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _keys(against: str) -> tuple[str, ...]:
    """Split and check the keys of ``--against``. Raises PolicyError."""
    for key in words(against):
        try:
            ReusePolicy.parse(key)
        except PolicyError as error:
            raise PolicyError(f"--against: {error}", field=error.field, code=str(error.code)) from None
    return words(against)


def prompts_file(path: Path, schema: Schema | None) -> list[Prompt | Conversation]:
    """Read prompts of a schema from JSON lines, or chat requests if there is no schema.

    Raises ParameterError, and PMLError for a wrong prompt.
    """
    found: list[Prompt | Conversation] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            if len(found) == _MOST_PROMPTS:
                raise ParameterError(f"{where}: there are more than {_MOST_PROMPTS:,} prompts; give fewer")
            if schema is None:
                found.append(_messages(_value(line, where), where))
                continue
            prompt = _prompt(_value(line, where), where)
            if prompt.schema != schema.name:
                raise ParameterError(
                    f"{where}: the prompt is of schema '{prompt.schema}', and --schema is '{schema.name}'; give "
                    "prompts of that one"
                )
            resolve(schema, prompt, moves=True)
            found.append(prompt)
    if not found:
        raise ParameterError(f"{path} holds no prompts; write one on each line")
    return found


def _value(line: bytes, where: str) -> Any:
    try:
        return read_json(line)
    except JSONError as error:
        told = error.fault.value + (f" ({clip(error.detail)})" if error.detail else "")
        raise ParameterError(f"{where}: {told}; write one prompt as JSON on each line") from None


def _messages(value: Any, where: str) -> Conversation:
    """Return a chat request, a line of a batch, or a list of messages as a conversation. Raises ParameterError."""
    if isinstance(value, dict) and isinstance(value.get("body"), dict):
        value = value["body"]
    request = value if isinstance(value, dict) else {"messages": value}
    messages = request.get("messages")
    if not messages or not is_conversation(messages):
        raise ParameterError(
            f'{where}: is no chat request; write {{"messages": [{{"role": "user", "content": …}}]}}, or give --schema '
            "for prompts of a schema",
            code="prompt.unknown_form",
        )
    conversation = Conversation(messages, request.get("tools"))
    try:
        check_messages(conversation)
        if not has_modules(conversation):
            raise ParameterError(
                "no part is marked, so nothing is reused but prefixes; mark documents with cache_control",
                code="prompt.not_marked",
            )
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}", code=str(error.code)) from None
    return conversation


def _prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, dict) and isinstance(value.get("pml"), str):
        value = value["pml"]
    if isinstance(value, str):
        return Prompt.from_string(value, source=where)
    if isinstance(value, dict):
        return Prompt.from_json(value, source=where)
    raise ParameterError(f'{where}: is no prompt; write "<prompt schema=…>…</prompt>", or its JSON form')


def _about(llm: LLM) -> dict[str, Any]:
    """Describe the model's support for reuse, with reasons."""
    from inlay.models.families import family_of

    info, config = llm.client.model, llm.loaded.model.config
    allows = family_of(config).allows(config)
    return {
        "model": llm.model_name,
        "family": config.model_type,
        "fingerprint": info.fingerprint(None).hex(),
        "shifts": allows.shifts if info.why_not_shift is None else None,
        "why_not_shift": info.why_not_shift,
        "windows": sorted(set(allows.windows)),
        "sinks": allows.sinks,
        "max_positions": info.max_positions,
        "dtype": str(llm.loaded.model.dtype).removeprefix("torch."),
        "quantization": llm.loaded.form.quantization,
        "device": str(llm.loaded.model.device),
    }


def _print_about(about: dict[str, Any]) -> None:
    windows = ", ".join(f"{window:,}" for window in about["windows"])
    sinks = "yes" if about["sinks"] else "none"
    form = about["dtype"] + ("" if about["quantization"] is None else f", quantized to {about['quantization']}")
    print(f"{about['model']} is of the family {about['family']}, in {form}, on {about['device']}.")
    print("reuse off and exact: answers are those of the stock model")
    print("modules at the positions of their schema: yes")
    why = about["why_not_shift"]
    print(f"modules at other positions: {'yes, by ' + str(about['shifts']) if why is None else f'refused: {why}'}")
    print(f"sliding windows: {windows + ' positions' if windows else 'none'}; sinks: {sinks}")
    print(f"positions: {about['max_positions']:,}")


def _print_found(found: Check, about: dict[str, Any]) -> None:
    from rich.table import Table

    from inlay.cli.output import stdout_console

    kinds = ", ".join(f"{of['prompts']:,} of {kind}" for kind, of in about["kinds"].items())
    places = " and ".join(dict.fromkeys(row.positions for row in found.rows if ReusePolicy.parse(row.policy).modular))
    print(f"\nCompared with full prefill on {kinds}{', modules ' + places if places else ''}:")
    table = Table(box=None, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("KL", "at most", "top 1", "same", "recomputed", "TTFT"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(
            row.policy,
            f"{row.kl:.2g}",
            f"{row.kl_high:.2g}",
            f"{row.top1:.1%}",
            "–" if row.same is None else f"{row.same:.1%}",
            f"{row.recomputed:.1%}",
            "–" if row.ttft_ms is None else f"{row.ttft_ms:,.1f} ms",
            style="bold" if row.policy == found.recommended else None,
        )
    stdout_console().print(table, markup=False)
    for one in found.refused:
        print(f"{one.policy}, {one.positions}: refused: {one.reason}")
    if found.meaningless is not None:
        print(f"{found.meaningless}; only distributions were compared.")
    print(f"\nRecommended: {found.recommended}, as {found.reason}.")
    if about["kept"] is not None:
        print(f"Kept in {about['kept']} for reuse 'auto'.")
