"""The engine chooses among the candidates of a request, by the stored segments at its first admission."""

from __future__ import annotations

from typing import Any

from inlay.prompt.composed import CachedSpan
from tests.model.engine.driving import Driver, ids

DOCUMENT = "A document that nobody marks in this request."


def chat(question: str, *, marked: bool) -> list[dict[str, Any]]:
    document = {"type": "text", "text": DOCUMENT} | ({"cache_control": {"type": "ephemeral"}} if marked else {})
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": f"About {question}. "}, document]},
        {"role": "user", "content": question},
    ]


def read(request: Any) -> int:
    """The number of segments in its composed prompt beside the system turn."""
    return sum(isinstance(part, CachedSpan) for part in request.prompt.composed) - 1


def test_text_stored_while_a_request_waits_is_found():
    driver = Driver()
    before = driver.request(chat("First", marked=False))
    driver.run(before)
    assert read(before) == 0, "nothing like it was stored"
    waiting = driver.request(chat("Second", marked=False))
    driver.run(driver.request(chat("Third", marked=True)))
    driver.run(waiting)
    assert read(waiting) == 1
    assert waiting.usage.module_tokens + waiting.usage.exact_tokens >= len(DOCUMENT)


def test_text_evicted_while_a_request_waits_is_recomputed():
    driver = Driver()
    driver.run(driver.request(chat("First", marked=True)))
    waiting = driver.request(chat("Second", marked=False))
    assert driver.all_free()
    driver.run(waiting)
    assert read(waiting) == 0


def test_preempted_request_keeps_its_composed_prompt():
    driver = Driver(kv_tokens=240, max_model_len=320)  # so the primer is short
    driver.run(driver.request(chat("First", marked=True), 1))
    late = driver.request(chat("Second", marked=False), 60, priority=1)
    driver.add(late)
    driver.step(2)
    chosen = late.prompt.composed
    assert read(late) == 1
    driver.add(driver.request(ids(80), 120))
    while driver.engine.busy and not late.preemptions:
        driver.step()
    assert late.preemptions
    driver.store.clear()  # its segments may be gone by now
    driver.finish()
    assert late.prompt.composed is chosen
    assert (late.error, len(late.token_ids)) == (None, 60)


def test_all_answers_to_a_prompt_read_the_same_segments():
    driver = Driver(max_num_seqs=1)
    driver.run(driver.request(chat("First", marked=True), 1))
    leader = driver.request(chat("Second", marked=False), 4, n=3, temperature=1.0)
    driver.add(leader)
    driver.step(2)
    assert read(leader) == 1
    while not leader.finished:
        driver.step()
    driver.store.clear()
    driver.finish()
    assert [member.prompt.composed is leader.prompt.composed for member in leader.family] == [True] * 3
    assert all(len(member.token_ids) == 4 for member in leader.family)
