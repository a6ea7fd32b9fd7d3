"""Prompt Cache's applications (§5.6): several source files, a travel plan with parameters, a learner's traits."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from inlay.client.llm import LLM
from inlay.models.spec import dtype_name
from inlay.pml import Prompt, Schema
from inlay.wording import counted
from inlay_lab.bench.machine import clocked, fast_dtype, in_turns
from inlay_lab.bench.stock import check_another_fits, exact_text, load_stock, prefill
from inlay_lab.bench.ttft import first_token
from inlay_lab.reproduce import published
from inlay_lab.reproduce.experiment import Data, Outcome, Row, Settings, Table
from inlay_lab.reproduce.plots import draw_pairs

#: Returns a text of the given number of tokens.
Text = Callable[[int], str]

_FILES = ("unit.py", "player.py", "game.py", "database.py")
_PLACES = ("maldives", "amazon", "sahara", "tokyo", "rome", "capetown", "sydney", "buenosaires")
#: The features of a learner and the members of each union, from the appendix's schema.
_TRAITS = {
    "grade": ("elementary", "middle-school", "high-school", "college", "graduate-school", "adult-education"),
    "proficiency": ("beginner", "intermediate", "advanced", "expert"),
    "history": (
        "recently-studied",
        "studied-a-month-before",
        "studied-6-months-before",
        "studied-a-year-before",
        "studied-10-years-before",
        "never-studied",
    ),
    "style": ("visual", "auditory", "kinesthetic", "reading", "multimodal"),
    "assessment": ("multiple-choice", "essay", "oral-presentation", "group-projects", "self-assessment"),
    "motivation": ("high-intrinsic-motivation", "high-extrinsic-motivation", "needs-encouragement", "lacks-direction"),
}


def code(text: Text, tokens: int) -> tuple[str, str]:
    """Figure 6: a module for each source file, and a prompt that imports all of them. Returns schema and prompt."""
    modules = "".join(_module(name, text(tokens)) for name in _FILES)
    schema = f"<system>{text(32)}</system><user>{text(16)}{modules}</user>"
    return _pair("code-generation-game", schema, "".join(f"<{name}/>" for name in _FILES) + _user(text(32)))


def trip(text: Text, tokens: int) -> tuple[str, str]:
    """Figure 8: two parameters, one of them in a union of unions. Returns schema and prompt."""
    places = "".join(_module(name, text(tokens)) for name in _PLACES)
    domestic = _module("domestic", f'{text(tokens // 4)}<parameter name="city" length="16"/>{text(tokens // 4)}')
    overseas = _module("overseas", f"{text(tokens // 4)}<union>{places}</union>")
    plan = f'{text(tokens // 2)}<parameter name="duration" length="16"/>{text(tokens // 4)}'
    plan = _module("travel-plan", f"{plan}<union>{domestic}{overseas}</union>")
    asked = '<travel-plan duration="3 days"><overseas><tokyo/></overseas></travel-plan>' + _user(text(32))
    return _pair("travel", f"<system>{text(32)}</system><user>{plan}</user>", asked)


def personalization(text: Text, tokens: int) -> tuple[str, str]:
    """Figure 7: a union for each feature of a learner, and a prompt with one member of each. Returns schema and
    prompt.
    """
    unions = "".join(
        f"{text(8)}<union>{''.join(_module(name, text(tokens)) for name in names)}</union>"
        for names in _TRAITS.values()
    )
    chosen = "".join(f"<{names[-1]}/>" for names in _TRAITS.values())
    schema = f"<system>{text(32)}</system><user>{unions}</user>"
    return _pair("personalization-education", schema, chosen + _user(text(32)))


APPLICATIONS = {"code generation": code, "personalization": personalization, "trip planning": trip}


def _module(name: str, text: str) -> str:
    return f'<module name="{name}">{text}</module>'


def _user(text: str) -> str:
    return f"<user>{text}</user>"


def _pair(name: str, schema: str, prompt: str) -> tuple[str, str]:
    return f'<schema name="{name}">{schema}</schema>', f'<prompt schema="{name}">{prompt}</prompt>'


def measure_applications(settings: Settings) -> Outcome:
    """Times to the first token of each application, beside the stock model's on the same ids."""
    llm = LLM(
        settings["model"],
        dtype=fast_dtype(),
        weights="packed",
        reuse="isolated",
        promotion_memory=0,
        seed=0,
        device="cpu",
    )
    model = llm.loaded.model
    check_another_fits(model.config, model.dtype)
    stock = load_stock(settings["model"], dtype_name(model.dtype))
    lines = []
    timed: dict[str, tuple[float, float]] = {}
    for name, make in APPLICATIONS.items():
        schema, prompt = make(partial(exact_text, llm, draw=random.Random(0)), settings["tokens"])
        llm.add_schema(Schema.from_string(schema, source=f"{name}.xml"))
        asked = Prompt.from_string(prompt, source=f"{name}-prompt.xml")
        output = first_token(llm, asked)
        ids = torch.tensor([output.prompt_token_ids])
        meters = {
            "ours": clocked(partial(first_token, llm, asked)),
            "full": clocked(partial(prefill, stock, ids)),
        }
        took = in_turns(meters, settings["runs"])
        full, ours = took["full"].ms, took["ours"].ms
        timed[name] = (full, ours)
        usage = output.usage
        lines.append(
            [
                name,
                f"{usage.cached_tokens:,}",
                f"{usage.computed_tokens:,}",
                f"{full:,.0f}",
                f"{ours:,.1f}",
                f"{full / ours:.1f}×",
            ]
        )
    llm.shutdown()
    times = {name: full / ours for name, (full, ours) in timed.items()}
    name = f"{settings['model'].removeprefix('random:')} in {fast_dtype()}"
    why = f"{name} on this CPU, where the paper has CodeLlama 7B on a GPU: prefill costs more here"
    return Outcome(
        [
            Row("code generation: times as fast", "×", times["code generation"], published.CODE_TIMES, why),
            *(Row(f"{each}: times as fast", "×", times[each]) for each in ("personalization", "trip planning")),
        ],
        [
            Table(
                "Milliseconds to the first token",
                ["application", "cached tokens", "new tokens", "full prefill", "modules cached", "times as fast"],
                lines,
            )
        ],
        [
            "The schemas have the form of the paper's appendix A.1, with unions and parameters, and made-up texts of "
            f"{settings['tokens']:,} tokens a module. The paper prints a figure for code alone; the other two are "
            "drawn. What the answers are worth is not measured here, since the weights are random: see `quality` and "
            "`paired-quality`."
        ],
        {
            "labels": list(timed),
            "one": [full / 1000 for full, _ in timed.values()],
            "other": [ours / 1000 for _, ours in timed.values()],
            "title": f"Three applications, {name}, {counted(torch.get_num_threads(), 'thread')}",
        },
    )


def draw_applications(data: Data, path: Path) -> None:
    """Draw both times of each application."""
    names = ("full prefill, stock transformers", "inlay, modules cached")
    draw_pairs(data, path, names=names, axis="time to first token, s")
