"""``inlay bench content``: repeated text without marks is read nearly as often as with marks."""

from __future__ import annotations

import pytest

from inlay import ParameterError
from inlay.errors import ContextError
from inlay_lab.bench.content import ContentSetting, measure_content
from inlay_lab.bench.content_prompts import (
    SIGHTINGS,
    STEPS,
    WORKLOADS,
    Sizes,
    repeated_texts,
    without_marks,
    write_prompts,
)
from tests.raising import raises

SMALL = Sizes(prompts=16, documents=6, paragraphs=2, chosen=2, characters=300)


def asked(workload: str, sizes: Sizes = SMALL) -> dict[str, dict[str, int]]:
    rows = measure_content(ContentSetting(workload=workload, sizes=sizes))["rows"]
    assert len({row["prompt"] for row in rows.values()}) == 1
    assert all(row["read"] + row["computed"] == row["prompt"] for row in rows.values())
    return rows


def test_documents_in_new_combinations_are_read_without_marks() -> None:
    tokens = {name: row["read"] for name, row in asked("rag").items()}
    assert tokens["exact"] < tokens["content"] <= tokens["marks"]
    assert tokens["content"] >= 0.6 * tokens["marks"]


def test_files_of_other_sessions_are_read_without_marks() -> None:
    rows = asked("agent", Sizes(prompts=4 * STEPS, characters=400))
    assert rows["exact"]["recomputed"] == 0 < rows["content"]["recomputed"]  # modules, not prefixes alone
    assert 0.75 * rows["marks"]["read"] <= rows["content"]["read"]


def test_text_is_read_from_its_third_occurrence() -> None:
    done: list[tuple[int, int]] = []
    sizes = Sizes(prompts=2 * SIGHTINGS)
    result = measure_content(ContentSetting(workload="repeat", sizes=sizes), lambda *at: done.append(at))
    assert done[-1] == (2 * SIGHTINGS, 2 * SIGHTINGS)
    for row in result["rows"].values():
        assert len(row["sightings_ms"]) == SIGHTINGS
        assert all(time > 0 for time in row["sightings_ms"])
    third, second = (
        measure_content(ContentSetting(workload="repeat", sizes=Sizes(prompts=count)))["rows"] for count in (3, 2)
    )
    assert third["marks"]["read"] > second["marks"]["read"] > second["content"]["read"]
    assert third["content"]["read"] - second["content"]["read"] > 100


def test_an_interruption_keeps_the_prompts_so_far() -> None:
    def interrupt(done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    result = measure_content(ContentSetting(sizes=SMALL), interrupt)
    assert result["prompts"] == 2
    assert result["rows"]["content"]["prompt"] > 0


@pytest.mark.parametrize("workload", WORKLOADS)
def test_prompts_are_the_same_with_and_without_marks(workload: str) -> None:
    prompts = write_prompts(workload, SMALL)
    assert len(prompts) == SMALL.prompts
    assert write_prompts(workload, SMALL) == prompts
    texts = repeated_texts(prompts)
    shown = ["".join(message["content"] for message in without_marks(messages)) for messages in prompts]
    assert texts
    assert all(any(text in each for each in shown) for text in texts)


def test_wrong_sizes_are_refused() -> None:
    with raises("parameter.out_of_range", ParameterError):
        Sizes(documents=2, chosen=3)
    with raises("parameter.unknown_choice", ParameterError):
        ContentSetting(workload="novel")
    with pytest.raises(ContextError):
        measure_content(ContentSetting(sizes=Sizes(prompts=2, documents=4, paragraphs=40)))
