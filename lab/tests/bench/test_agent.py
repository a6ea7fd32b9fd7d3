"""``inlay bench agent``: changed tools or files cost an exact request the conversation, and a modular one little."""

from __future__ import annotations

import pytest

from inlay.errors import ContextError, ParameterError
from inlay_lab.bench.agent import AgentSetting, AgentTurn, first_tokens_of_llama, measure_agent

SMALL = AgentSetting(model="random:tiny", turns=4, tools=3, tokens=450, new=40, added_at=2, moved_at=4)


def computed(result: dict, run: str, policy: str) -> list[int]:
    return [turn["computed_tokens"] for turn in result["runs"][run][policy]]


def test_an_agent_whose_tools_and_files_change():
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


class Recorder:
    """Stands for a process of llama.cpp."""

    def meters(self, cached: int, new: int):
        return {"llama_held_ms": lambda: cached + new / 1000}


def test_llama_reads_the_prefix_of_the_last_prompt_and_answer():
    turns = [AgentTurn({}, "", ids, (9,)) for ids in ((1, 2, 3), (1, 2, 3, 9, 4, 5), (1, 2, 7), (1, 2, 7))]
    rows = list(first_tokens_of_llama(Recorder(), iter(turns)))
    assert [row["computed_tokens"] for row in rows] == [3, 2, 1, 1]
    assert rows[1]["ttft_s"] == 4.002


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
