"""Warming by plan: the best entries by seconds per byte, within a budget."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay import LLM, AsyncLLM, SamplingParams, Schema
from inlay.client.warm_plan import PlanEntry, choose
from inlay.errors import ParameterError
from inlay.retrieval.rerank import marked_parts
from tests.commands import run
from tests.conftest import tiny

SYSTEM = {"role": "system", "content": "Answer from the documents."}
DOCUMENTS = [
    "Lima lies by the sea. " * 40 + "\n",
    "Oslo lies to the north. " * 7 + "\n",
    "Rome has a river. " * 5 + "\n",
]
SCHEMA = '<schema name="s">Always. <module name="a">One module of some tokens.</module></schema>'
ENTRIES = st.lists(
    st.tuples(st.integers(1, 5), st.dictionaries(st.sampled_from("abcd"), st.none(), max_size=3)), max_size=6
)


@given(ENTRIES, st.lists(st.integers(1, 9), min_size=4, max_size=4), st.integers(0, 25))
def test_the_choice_is_the_best_by_seconds_per_byte(drawn, sizes, budget):
    """Of all sets within the budget, it is the first when sets are compared entry by entry, the best ratio first."""
    size_of = dict(zip("abcd", sizes, strict=True))
    entries = [(float(use), {key.encode(): size_of[key] for key in keys}) for use, keys in drawn]
    ranked = sorted(range(len(entries)), key=lambda index: -entries[index][0])

    def cost(taken):
        union = {
            key: size
            for index, yes in zip(ranked, taken, strict=True)
            if yes
            for key, size in entries[index][1].items()
        }
        return sum(union.values())

    best = max(taken for taken in product((False, True), repeat=len(entries)) if cost(taken) <= budget)
    chosen = choose(entries, budget)
    assert [index for index, _ in chosen] == [index for index, yes in zip(ranked, best, strict=True) if yes]
    assert sum(size for _, size in chosen) == cost(best) <= budget


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 40))
def test_no_set_of_equal_sizes_saves_more(uses, budget):
    entries = [(float(use), {bytes([number]): 5}) for number, use in enumerate(uses)]
    sums = [
        sum(use for use, yes in zip(uses, taken, strict=True) if yes)
        for taken in product((False, True), repeat=len(uses))
        if 5 * sum(taken) <= budget
    ]
    assert sum(uses[index] for index, _ in choose(entries, budget)) == max(sums)


@pytest.mark.parametrize("reuse", ["modular", "primed", "anchored", "isolated"])
def test_prompts_read_the_chosen_texts(reuse):
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    plan = [PlanEntry(use, text=text, messages=[SYSTEM]) for use, text in zip((1, 3, 2), DOCUMENTS, strict=True)]
    everything = llm.warm_plan(plan, 1, reuse=reuse)
    assert {one.state for one in everything} == {"left out"}
    assert llm.stats().encoded_tokens == 0
    budget = everything[1].bytes + everything[2].bytes
    planned = llm.warm_plan(plan, budget, reuse=reuse)
    assert [one.state for one in planned] == ["left out", "encoded", "encoded"]
    assert 0 < sum(one.bytes for one in planned[1:]) <= budget
    assert planned[1].saved_s_per_byte == pytest.approx(3 * planned[0].saved_s_per_byte)
    assert planned[0].saved_s_per_byte > 0
    before = llm.stats().encoded_tokens
    assert before * llm.client.model.bytes_per_token <= budget
    again = llm.warm_plan(plan[1:], budget, reuse=reuse)
    assert [one.state for one in again] == ["stored", "stored"]
    assert llm.stats().encoded_tokens == before
    chat = [SYSTEM, {"role": "user", "content": marked_parts(DOCUMENTS[1:], "Where?")}]
    (output,) = llm.chat(chat, SamplingParams(max_tokens=1), reuse=reuse)
    scored = llm.score_cached(DOCUMENTS, messages=[SYSTEM], reuse=reuse)
    assert output.usage.cached_tokens >= scored[1].tokens + scored[2].tokens


def test_async_engine_warms_by_plan():
    async def warmed() -> None:
        llm = AsyncLLM(tiny("llama"), kv_memory="8MiB")
        plan = [PlanEntry(use, text=text, messages=[SYSTEM]) for use, text in zip((1, 3, 2), DOCUMENTS, strict=True)]
        first = await llm.warm_plan(plan, 1)
        planned = await llm.warm_plan(plan, first[1].bytes + first[2].bytes)
        assert [one.state for one in planned] == ["left out", "encoded", "encoded"]
        scores = await llm.score_cached(DOCUMENTS, messages=[SYSTEM])
        assert [one.resident_tokens > 0 for one in scores] == [False, True, True]
        await asyncio.to_thread(llm.shutdown)

    asyncio.run(warmed())


def test_modules_are_warmed_and_unknown_ones_refused():
    llm = LLM(tiny("llama"), kv_memory="8MiB")
    llm.add_schema(Schema.from_string(SCHEMA), encode=False)
    (one,) = llm.warm_plan([PlanEntry(schema="s", module="a")], "1MiB")
    assert one.state == "encoded"
    stored = llm.stored("s")["a"]
    assert stored[0] == stored[1] > 0
    with pytest.raises(ParameterError) as caught:
        llm.warm_plan([PlanEntry(schema="s", module="b")], "1MiB")
    assert caught.value.code == "plan.unknown_module"
    with pytest.raises(ParameterError) as caught:
        llm.warm_plan([PlanEntry(0, text="a")], "1MiB")
    assert caught.value.code == "plan.wrong_entry"


def test_second_warm_command_encodes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.xml").write_text(SCHEMA)
    lines = [{"text": DOCUMENTS[0], "expected": 9}, {"schema": "s.xml", "module": "a"}]
    Path("plan").write_text("\n".join(map(json.dumps, lines)))
    asked = ("cache", "warm", "--plan", "plan", "--budget", "64MiB", "--store", "here", "--json")
    status, out, err = run(capsys, *asked)
    assert status == 0, err
    assert [row["state"] for row in json.loads(out)] == ["encoded", "encoded"]
    status, out, err = run(capsys, *asked)
    assert [(row["state"], row["tokens"]) for row in json.loads(out)] == [("stored", 0)] * 2, err
    status, out, err = run(capsys, *asked[:-1])
    assert status == 0, err
    assert "0 tokens encoded" in out
    assert "s/a" in out


@pytest.mark.parametrize(
    "line", ["{", "3", '{"text": 3}', '{"text": "a", "expected": 0}', '{"schema": "no", "module": "a"}', '{"txt": "a"}']
)
def test_invalid_line_is_reported_with_its_number(capsys, tmp_path, line):
    (tmp_path / "plan").write_text('{"text": "a"}\n' + line)
    status, _, err = run(capsys, "cache", "warm", "--plan", str(tmp_path / "plan"), "--budget", "1MiB")
    assert status == 2
    assert "plan:2: " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--plan", "p"),
        ("--budget", "1MiB", "s.xml"),
        ("--json", "s.xml"),
        (),
        ("--plan", "p", "--budget", "1", "s.xml"),
    ],
)
def test_conflicting_options_are_rejected(capsys, options):
    assert run(capsys, "cache", "warm", *options)[0] == 2
