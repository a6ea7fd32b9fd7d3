"""Batches over tiny models: every answer is the one that LLM.generate gives, in an order that shares."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from inlay import LLM, AsyncLLM, ParameterError, PMLError, Prompt, SamplingParams, Schema, batch
from inlay.batch import run as module
from tests.conftest import tiny
from tests.model.hooks import each_pass
from tests.raising import raises
from tests.system.batch.helpers import CHAT, bodies, line, read, run, texts, write

SCHEMA = Schema.from_string(
    '<schema name="s">In front. <module name="a">The first module.</module><module name="b">Another.</module></schema>'
)
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny("llama"), kv_memory="16MiB", seed=0)


def test_every_answer_equals_generate(llm, tmp_path: Path):
    llm.add_schema(SCHEMA)
    pml = '<prompt schema="s"><b/>Why?</prompt>'
    conversation = [{"role": "user", "content": "Hello"}]
    rows = [
        line("text", prompt="Some words."),
        line("ids", prompt=[5, 6, 7]),
        line("several", prompt=["Some words, and more.", "Other words."]),
        line("chat", CHAT, messages=conversation),
        line("json form", prompt={"schema": "s", "content": [{"import": "a"}, "Why?"]}),
        line("pml", CHAT, pml=pml),
        line("exact", CHAT, pml=pml, reuse="exact"),
    ]
    prompts: dict[str, list[Any]] = {
        "text": ["Some words."],
        "ids": [[5, 6, 7]],
        "several": ["Some words, and more.", "Other words."],
        "chat": [conversation],
        "json form": [Prompt.from_string('<prompt schema="s"><a/>Why?</prompt>')],
        "pml": [Prompt.from_string(pml)],
    }
    counts = run(write(tmp_path / "in", rows), tmp_path / "out", schemas=[SCHEMA])
    expected = {
        name: [output.outputs[0].text for output in llm.generate(given, GREEDY)] for name, given in prompts.items()
    }
    (exact,) = llm.generate([Prompt.from_string(pml)], GREEDY, reuse="exact")
    assert texts(tmp_path / "out") == {**expected, "exact": [exact.outputs[0].text]}
    assert (counts.requests, counts.answered, counts.failed) == (7, 7, 0)
    assert counts.completion_tokens == sum(
        body["usage"]["completion_tokens"] for body in bodies(tmp_path / "out").values()
    )
    for row, body in ((row, bodies(tmp_path / "out")[row["custom_id"]]) for row in rows):
        (ChatCompletion if row["url"] == CHAT else Completion).model_validate(body, strict=True)
        assert body["model"] == "tiny"


def test_draws_depend_on_the_seed_or_custom_id(llm, tmp_path: Path):
    rows = [line("seeded", prompt="Hello", temperature=1, seed=7, n=3, logprobs=2)]
    rows += [line(name, prompt="Hello", temperature=1.5, max_tokens=12) for name in "abcd"]
    run(write(tmp_path / "in", rows), tmp_path / "out")
    (output,) = llm.generate(["Hello"], SamplingParams(temperature=1, seed=7, n=3, logprobs=2, max_tokens=4))
    found = texts(tmp_path / "out")
    assert found["seeded"] == [answer.text for answer in output.outputs]
    assert len({found[name][0] for name in "abcd"}) == 4
    # the same again, in another file order and one at a time; and others from another seed
    run(write(tmp_path / "in2", rows[::-1]), tmp_path / "out2", llm={"max_num_seqs": 1})
    assert texts(tmp_path / "out2") == found
    run(tmp_path / "in", tmp_path / "out3", seed=1)
    others = texts(tmp_path / "out3")
    assert others["seeded"] == found["seeded"]
    assert all(others[name] != found[name] for name in "abcd")


def test_invalid_line_becomes_an_error_row(tmp_path: Path):
    rows: list[Any] = [
        line("good", prompt="Hello"),
        "nonsense",
        line("field", prompt="Hello", tools=[1]),
        line("stream", prompt="Hello", stream=True),
        line("model", prompt="Hello", model="gpt-4o"),
        line("schema", prompt={"schema": "none"}),
        line("module", prompt={"schema": "s", "content": [{"import": "zzz"}]}),
        line("ids", prompt=[1, 999]),
        line("later", prompt=["Hello", "Hello " * 400]),  # the first prompt alone is good
        line("long", prompt="Hello " * 400),
        line("reuse", prompt="Hello", reuse="some"),
        line("json", prompt="Hello", structured_outputs={"regex": "("}),
    ]
    counts = run(write(tmp_path / "in", rows), tmp_path / "out", schemas=[SCHEMA])
    assert (counts.requests, counts.answered, counts.failed) == (12, 1, 11)
    rows_read = {int(row["id"].removeprefix("batch_req_")): row for row in read(tmp_path / "out")}
    assert sorted(rows_read) == list(range(1, 13))
    assert rows_read[2]["error"]["message"].startswith("line 2: this is not JSON")
    assert rows_read[2]["custom_id"] is rows_read[2]["response"] is None
    expected = [
        (3, 400, "tools", "line 3: tools is not supported"),
        (4, 400, "stream", "line 4: stream is true; the answers of a batch come whole"),
        (5, 404, "model", "line 5: model is 'gpt-4o' and this batch runs 'tiny'; write that, leave it out, or add --s"),
        (6, 400, "prompt", "line 6: the batch has no schema 'none'; give its file with --schema"),
        (7, 400, None, 'line 7: prompt: content[0].import "zzz": schema "s" has no module "zzz"'),
        (8, 400, None, "line 8: a prompt holds the token id 999; ids go from 0 to 261"),
        (9, 400, None, "line 9: the prompt ends at position"),
        (10, 400, None, "line 10: the prompt ends at position"),
        (11, 400, "reuse", "line 11: reuse='some' is not a reuse policy"),
        (12, 400, "structured_outputs", "line 12: structured_outputs['regex'] cannot be used"),
    ]
    for number, status, param, message in expected:
        response = rows_read[number]["response"]
        assert (response["status_code"], response["body"]["error"]["param"]) == (status, param)
        assert response["body"]["error"]["message"].startswith(message)


def test_every_served_name_is_answered(tmp_path: Path):
    rows = [line("a", prompt="x", model="gpt-4o"), line("b", prompt="x", model="tiny"), line("c", prompt="x")]
    run(write(tmp_path / "in", rows), tmp_path / "out", names=("tiny", "gpt-4o"))
    assert {name: body["model"] for name, body in bodies(tmp_path / "out").items()} == {
        "a": "gpt-4o",
        "b": "tiny",
        "c": "tiny",
    }


def shared_prompts() -> list[str]:
    """Ten documents with six questions each, shuffled."""
    prompts = [f"Document {n:02}. {'word ' * 20}" + f"Question {q}?" for n in range(10) for q in range(6)]
    random.Random(0).shuffle(prompts)
    return prompts


def computed(path: Path) -> int:
    return sum(body["inlay"]["computed_tokens"] for body in bodies(path).values())


def fewest(prompts: list[str]) -> int:
    """Tokens (bytes, here) of the prefix tree of all prompts; every prompt computes its last token, for its logits."""
    ordered = sorted(prompt.encode() for prompt in prompts)
    shared = [sum(1 for _ in _common(a, b)) for a, b in pairwise(ordered)]
    return sum(map(len, ordered)) - sum(shared)


def _common(a: bytes, b: bytes):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def test_prompts_with_a_common_prefix_run_together(tmp_path: Path, monkeypatch):
    prompts = shared_prompts()
    source = write(tmp_path / "in", [line(str(n), prompt=prompt, max_tokens=1) for n, prompt in enumerate(prompts)])
    small = {"max_num_seqs": 2, "kv_memory": "500KiB"}  # room for a few documents, not for ten
    run(source, tmp_path / "out", llm=small)
    monkeypatch.setattr(module, "sort_key", lambda llm, call: b"")  # the order of the file
    run(source, tmp_path / "unsorted", llm=small)
    assert texts(tmp_path / "out") == texts(tmp_path / "unsorted")
    least = fewest(prompts)
    assert least <= computed(tmp_path / "out") < 1.1 * least
    assert computed(tmp_path / "unsorted") > 2 * least


def test_prompts_of_one_schema_run_together(tmp_path: Path, monkeypatch):
    other = Schema.from_string(SCHEMA.to_pml().replace('name="s"', 'name="t"').replace("first", "other"))
    rows = [
        line(f"{schema}{module_}{n}", prompt={"schema": schema, "content": [{"import": module_}, f"{n}"]}, max_tokens=1)
        for n in range(5)
        for schema in "st"
        for module_ in "ab"
    ]
    order: list[str] = []
    monkeypatch.setattr(module.Index, "read", _noting(order, module.Index.read))
    run(write(tmp_path / "in", rows), tmp_path / "out", schemas=[SCHEMA, other])
    assert len(bodies(tmp_path / "out")) == 20
    groups = [name[:2] for name in order[20:]]  # as they start, not as they end; before, all were read to be sorted
    assert groups == sorted(groups, key=lambda group: (group[0], groups.index(group)))
    assert sum(1 for a, b in pairwise(groups) if a != b) == 3


def _noting(order: list[str], real: Any) -> Any:
    def noted(self: Any, entry: Any) -> Any:
        order.append(entry.custom_id)
        return real(self, entry)

    return noted


def test_number_of_running_requests_is_bounded(tmp_path: Path, monkeypatch):
    under_way = most = 0
    generate = AsyncLLM.generate

    async def counted(*arguments: Any, **settings: Any):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            async for output in generate(*arguments, **settings):
                yield output
        finally:
            under_way -= 1

    monkeypatch.setattr(AsyncLLM, "generate", counted)
    rows = [line(str(n), prompt=[f"Words {n}.", "More."] if n % 5 == 0 else f"Words {n}.") for n in range(40)]
    run(write(tmp_path / "in", rows), tmp_path / "out", llm={"max_num_seqs": 3})
    assert len(bodies(tmp_path / "out")) == 40
    assert 1 < most <= 6


def test_failing_model_ends_the_batch_and_it_resumes(tmp_path: Path):
    source = write(tmp_path / "in", [line(str(n), prompt=f"Words {n}.") for n in range(20)])
    passes = itertools.count(1)

    def fails_later(_: int) -> None:
        if next(passes) == 15:  # the first ones are checks of the model at its load
            raise RuntimeError("out of order")

    with each_pass(tiny("llama"), before=fails_later), raises("batch.model_failed", names="out of order"):
        run(source, tmp_path / "out", llm={"max_num_seqs": 4, "speculation": "off"})
    before = texts(tmp_path / "out")
    assert 0 < len(before) < 20
    counts = run(source, tmp_path / "out")
    assert (counts.done_before, counts.answered) == (len(before), 20)
    run(source, tmp_path / "whole")
    assert texts(tmp_path / "out") == texts(tmp_path / "whole")


def test_request_larger_than_the_pool_fails(tmp_path: Path):
    source = write(tmp_path / "in", [line("small", prompt="Hello"), line("large", prompt="Hello " * 300)])
    counts = run(source, tmp_path / "out", llm={"kv_memory": "400KiB"})
    assert (counts.answered, counts.failed) == (1, 1)
    failed = next(row for row in read(tmp_path / "out") if row["custom_id"] == "large")
    assert failed["response"]["status_code"] == 400
    assert "give kv_memory at least" in failed["response"]["body"]["error"]["message"]


def test_finished_batch_needs_no_model(tmp_path: Path):
    source = write(tmp_path / "in", [line("a", prompt="Hello")])
    run(source, tmp_path / "out")
    counts = run(source, tmp_path / "out", llm={"kv_memory": "nonsense"})
    assert (counts.done_before, counts.answered, counts.prompt_tokens) == (1, 1, 0)


def test_another_model_is_refused(tmp_path: Path):
    source = write(tmp_path / "in", [line("a", prompt="Hello"), line("b", prompt="Hello")])
    run(source, tmp_path / "out")
    (tmp_path / "out").write_text((tmp_path / "out").read_text().splitlines(keepends=True)[0])
    with raises("batch.other_output", ParameterError, names="model or dtype"):
        run(source, tmp_path / "out", model=tiny("qwen2"))


def test_batch_restarts_after_a_schema_is_fixed(tmp_path: Path):
    source = write(tmp_path / "in", [line("a", prompt={"schema": "s", "content": "Why?"})])
    long = Schema.from_string(
        '<schema name="s"><module name="a"><param name="p" len="1" default="long"/></module></schema>'
    )
    with raises("pml.argument_too_long", PMLError, names="'p'"):
        run(source, tmp_path / "out", schemas=[long])
    assert run(source, tmp_path / "out", schemas=[SCHEMA]).answered == 1
    with raises("batch.other_output", ParameterError, names="schemas"):
        run(source, tmp_path / "out", schemas=[long])


def test_finished_batch_of_another_model_is_rejected(tmp_path: Path):
    source = write(tmp_path / "in", [line("a", prompt="Hello")])
    run(source, tmp_path / "out", loading={"model": "one"})
    before = (tmp_path / "out").read_bytes()
    with raises("batch.other_output", ParameterError, names="model or dtype"):
        run(source, tmp_path / "out", model=tiny("qwen2"), loading={"model": "two"})
    assert run(source, tmp_path / "out", loading={"model": "./one"}).answered == 1, "the same by another name"
    assert (tmp_path / "out").read_bytes() == before


def test_deprecated_names_still_work():
    assert (batch.Counts, batch.Job) == (batch.BatchCounts, batch.BatchJob)
