"""The table of the latest prompts: its bounds, and the separation of its owners."""

from __future__ import annotations

from inlay.prompt.seen_prompts import SeenPrompt, SeenPrompts, packed

MINE, OTHER = ("", "salt"), ("", "other")


def seen(*ids: int, **fields) -> SeenPrompt:
    return SeenPrompt(packed(ids), len(ids), kept=len(ids), **fields)


def test_an_owner_sees_only_its_own_prompts():
    table = SeenPrompts()
    first = seen(1, 2, 3)
    assert table.note(MINE, first) == ()
    assert table.note(OTHER, seen(1, 2, 3)) == ()
    assert table.note(("tenant", "salt"), seen(1, 2, 3)) == ()
    assert table.note(MINE, seen(1, 2, 4)) == (first,)


def test_an_owner_keeps_its_latest_eight_prompts():
    table = SeenPrompts()
    made = [seen(number, 7) for number in range(12)]
    for one in made:
        table.note(MINE, one)
    assert table.note(MINE, seen(99)) == tuple(made[-8:])


def test_continued_prompt_replaces_its_prefix():
    table = SeenPrompts()
    first = seen(1, 2, 3)
    table.note(MINE, first)
    table.answered(MINE, first, [4])
    second = seen(1, 2, 3, 4, 5)
    assert table.note(MINE, second) == (first,)
    assert second.stored == 4
    assert table.note(MINE, seen(9)) == (second,)


def test_a_repeated_prompt_replaces_the_first():
    table = SeenPrompts()
    first, again = seen(1, 2, 3), seen(1, 2, 3)
    table.note(MINE, first)
    table.answered(MINE, first, [4, 5])
    table.note(MINE, again)
    assert table.note(MINE, seen(9)) == (again,)


def test_prompts_of_another_adapter_or_policy_are_kept():
    table = SeenPrompts()
    made = [seen(1, 2), seen(1, 2, adapter=b"a"), seen(1, 2, policy="off")]
    for one in made:
        table.note(MINE, one)
    assert table.note(MINE, seen(9)) == tuple(made)


def test_endless_salts_stay_within_the_bytes():
    table = SeenPrompts(max_bytes=100_000)
    for number in range(5_000):
        table.note(("", f"salt-{number}"), seen(*range(number % 90)))
        assert table.bytes <= 100_000
    assert table.note(("", "salt-4999"), seen(1)) != ()
    assert table.note(("", "salt-0"), seen(1)) == ()


def test_a_prompt_above_the_bytes_is_dropped():
    table = SeenPrompts(max_bytes=10_000)
    table.note(MINE, seen(*range(5_000)))
    assert table.bytes == 0


def test_a_long_answer_stays_within_the_bytes():
    table = SeenPrompts(max_bytes=10_000)
    one = seen(1, 2)
    table.note(MINE, one)
    table.answered(MINE, one, range(5_000))
    assert table.bytes == 0
    table.answered(MINE, one, [1])
    assert table.bytes == 0


def test_forgetting_a_salt_keeps_other_salts():
    table = SeenPrompts()
    running = seen(1, 2)
    table.note(("a", "mine"), running)
    table.note(("b", "mine"), seen(3))
    table.note(("a", "other"), seen(4))
    table.forget("mine")
    table.answered(("a", "mine"), running, [5])
    assert table.note(("a", "mine"), seen(1)) == table.note(("b", "mine"), seen(1)) == ()
    assert table.note(("a", "other"), seen(1)) != ()
