"""``inlay bench agent``: changed tools or files cost an exact request the conversation, and a modular one little."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from inlay.errors import ContextError, ModelError, ParameterError
from inlay_lab.bench.agent import AgentSetting, measure_agent

SMALL = AgentSetting(model="random:tiny", turns=4, tools=3, tokens=450, new=40, added_at=2, moved_at=4)


def computed(result: dict, run: str, policy: str) -> list[int]:
    return [turn["computed_tokens"] for turn in result["runs"][run][policy]]


def test_changed_tools_and_files_cost_a_modular_agent_little():
    result = measure_agent(SMALL)
    lengths = result["prompt_tokens"]["changed"]
    assert [len(turns) for columns in result["runs"].values() for turns in columns.values()] == [4] * 4
    tool = SMALL.tokens // 2 // SMALL.tools
    new = 3 * SMALL.new  # a question, and the template's text around it
    for policy in ("exact", "modular"):
        assert max(computed(result, "same", policy)[1:]) <= new
    exact, modular = (computed(result, "changed", policy) for policy in ("exact", "modular"))
    assert exact[1] > lengths[1] // 2
    assert exact[3] > lengths[3] // 2
    assert modular[1] <= tool + 2 * new
    assert max(modular[2:]) <= new
    assert all(turn["ttft_s"] > 0 for turn in result["runs"]["changed"]["modular"])


def test_dropped_thinking_costs_the_answer_after_it():
    plain, thinking = measure_agent(SMALL), measure_agent(replace(SMALL, thinking=60))
    assert thinking["prompt_tokens"] == plain["prompt_tokens"]
    pairs = zip(computed(thinking, "same", "exact")[1:], computed(plain, "same", "exact")[1:], strict=True)
    assert all(SMALL.new // 2 <= one - other <= 2 * SMALL.new for one, other in pairs)


FAKE = '''#!{python}
"""Stands for llama.cpp's server: says how many tokens of a prompt differ from the last one."""
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

last = []

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"status": "ok"}})

    def do_POST(self):
        global last
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["cache_prompt"] and body["n_predict"] in (0, 1)
        ids = body["prompt"]
        shared = next((n for n, (a, b) in enumerate(zip(last, ids)) if a != b), min(len(last), len(ids)))
        last = ids
        new = len(ids) - min(shared, len(ids) - 1)
        self.answer({{"timings": {{"prompt_n": new, "prompt_ms": 2.0 * new}}}})

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert open(words["-m"], "rb").read(4) == b"GGUF" and int(words["-c"]) > {least}
HTTPServer((words["--host"], int(words["--port"])), Handler).serve_forever()
'''


@pytest.fixture
def program(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    path = tmp_path / "llama-server"
    path.write_text(FAKE.format(python=sys.executable, least=SMALL.tokens))
    path.chmod(0o755)
    return path


def test_llama_server_reads_the_prefix_of_the_last_prompt(program: Path):
    result = measure_agent(replace(SMALL, dtype="bfloat16", llama_server=program))
    assert result["without_llama"] is None
    for run in ("same", "changed"):
        new, exact = computed(result, run, "llama-server"), computed(result, run, "exact")
        assert new[0] == exact[0] == result["prompt_tokens"][run][0]
        assert all(abs(ours - theirs) <= 64 for ours, theirs in zip(exact, new, strict=True)), "a chunk at most"
        assert [turn["ttft_s"] for turn in result["runs"][run]["llama-server"]] == [each / 500 for each in new]


def test_missing_or_failing_server_is_named(tmp_path: Path, program: Path):
    with pytest.raises(ParameterError, match="--llama-server"):
        measure_agent(replace(SMALL, llama_server=tmp_path / "none"))
    program.write_text("#!/bin/sh\necho no such model\nexit 1\n")
    with pytest.raises(ModelError, match="no such model"):
        measure_agent(replace(SMALL, dtype="bfloat16", llama_server=program))


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"turns": 0}, ParameterError, "parameter"),
        ({"tokens": 10}, ParameterError, "parameter"),
        ({"tokens": 200_000}, ContextError, "request.too_long"),
    ],
)
def test_wrong_sizes_are_rejected(changes, error, code):
    with pytest.raises(error) as caught:
        measure_agent(AgentSetting(**({"model": "random:tiny", "turns": 1} | changes)))
    assert code in (caught.value.code or "")
