"""Where a prompt leaves the order of its modules free, the engine takes the one with the longest prefix match."""

from __future__ import annotations

import sys
from itertools import permutations

import pytest

from inlay import LLM, SamplingParams, Schema, any_order, use
from inlay.engine import order as order_module
from inlay.engine.background.promoter import MOST_NODES, RequestCounts
from inlay.engine.order import OrderChooser
from inlay.errors import ParameterError
from inlay.prompt.free_order import MAX_SETS
from inlay.prompt.request import EngineRequest
from tests.conftest import tiny
from tests.model.engine.driving import Driver, check_stock, prompt_of, work_off
from tests.raising import raises

TEXTS = {
    "a": "The first module of them, say.",
    "b": "The second one, which is longer.",
    "c": "A third, at last, and then some.",
    "d": "Under all that, one more module.",
}
MODULES = "".join(f'<module name="{name}">{text}</module>' for name, text in TEXTS.items())
FRONT = "In front of all. "
SCHEMA = Schema.from_string(f'<schema name="s">{FRONT}{MODULES}</schema>')
LENGTH = {name: len(text) for name, text in TEXTS.items()}


def free(names: str, text: str = "Well?"):
    return SCHEMA.prompt().any_order(*names).text(text)


def fixed(names: str, text: str = "Well?"):
    return prompt_of(SCHEMA, names, text)


def driver_for(model: str = "llama", *, encode: bool = True, **settings) -> Driver:
    driver = Driver(model, **settings)
    driver.schema(SCHEMA, encode=encode)
    return driver


def order_of(request) -> str:
    """The names of modules as the request stands."""
    return "".join(member.name for each in request.prompt.request.sets for member in each.members)


def ask(driver: Driver, prompt, **asked):
    request = driver.request(prompt, **{"reuse": "exact", **asked})
    driver.run(request)
    assert request.error is None
    return request


def text_of(driver: Driver, request) -> str:
    return driver.llm.tokenizer.decode(list(request.ids))


@pytest.mark.parametrize("model", ["llama", "gpt2", "mistral"])
def test_stored_order_is_chosen_and_equals_the_stock_model(model):
    driver = driver_for(model)
    ask(driver, fixed("ba", "First?"))
    request = ask(driver, free("ab", "Then?"))
    assert order_of(request) == "ba"
    assert request.usage.cached_tokens >= len(FRONT) + LENGTH["a"] + LENGTH["b"]
    assert request.usage.module_tokens == 0
    assert text_of(driver, request).endswith(FRONT + TEXTS["b"] + TEXTS["a"] + "Then?")
    check_stock(driver, request)


def test_written_order_is_kept_if_nothing_is_stored():
    driver = driver_for(encode=False)
    request = ask(driver, free("cab"))
    assert order_of(request) == "cab"
    check_stock(driver, request)


def test_longer_match_is_found_beyond_a_shorter_member():
    driver = driver_for()
    ask(driver, fixed("b", "A question behind the longest module alone."))
    ask(driver, fixed("adcb"))
    request = ask(driver, free("bcda"))
    assert order_of(request) == "adcb"
    assert request.usage.computed_tokens == 1


def test_most_requested_modules_follow_the_stored_prefix():
    driver = driver_for()
    for names in ("dc", "ca", "ca"):
        ask(driver, free(names))
    request = ask(driver, SCHEMA.prompt().text("Before. ").any_order("b", "d", "a", "c").text("?"))
    assert order_of(request) == "cadb", "c was asked for three times, a twice, d once"
    request = ask(driver, SCHEMA.prompt().text("Before. ").any_order("a", "b").text("?"))
    assert order_of(request) == "ab", "at this place it was c"


def test_few_tokens_of_a_common_prefix_do_not_count():
    schema = Schema.from_string(
        '<schema name="s"><module name="a">The one that is meant.</module>'
        '<module name="b">Another one.</module></schema>'
    )
    driver = Driver(chunk_size=16)
    driver.schema(schema, encode=False)
    ask(driver, schema.prompt().text("The o"))
    request = ask(driver, schema.prompt().any_order("b", "a").text("?"))
    assert order_of(request) == "ba"


def test_conversations_keep_their_first_order():
    driver = driver_for()
    ask(driver, fixed("ab", "Something else?"))
    ask(driver, fixed("ba", "First question? Answer. Second question?"))
    request = ask(driver, free("ab", "First question? Answer. Third one?"))
    assert order_of(request) == "ba", "what is stored behind the set tells two orders apart that are wholly stored"
    request = ask(driver, free("ba", "Something else? And?"))
    assert order_of(request) == "ab"


def test_orders_of_other_salts_are_invisible():
    driver = driver_for()
    for _ in range(3):
        ask(driver, free("cba"), salt="one")
        ask(driver, fixed("cba"), salt="one")
    assert order_of(ask(driver, free("abc"), salt="two")) == "abc"
    assert order_of(ask(driver, free("abc"), salt="one")) == "cba"
    assert order_of(ask(driver, free("bac"), salt="two")) == "abc", "its own"


def test_promoted_orders_of_other_salts_are_invisible():
    driver = driver_for()
    for _ in range(3):
        ask(driver, free("cba"), reuse="modular", salt="one")
        work_off(driver.engine.promoter)
    assert order_of(ask(driver, free("abc"), reuse="modular", salt="two")) == "abc"
    request = ask(driver, free("bac"), reuse="modular", salt="one")
    assert order_of(request) == "cba"
    assert request.usage.promoted_tokens > 0
    check_stock(driver, request)


@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_promoted_order_is_chosen(model):
    driver = driver_for(model)
    ask(driver, free("cab"), reuse="modular")
    second = ask(driver, free("abc"), reuse="modular")
    assert order_of(second) == "cab", "the one that was taken before"
    work_off(driver.engine.promoter)
    third = ask(driver, free("bca", "And?"), reuse="modular")
    assert order_of(third) == "cab"
    assert (third.usage.module_tokens, third.usage.promoted_tokens) == (0, sum(LENGTH[name] for name in "cab"))
    check_stock(driver, third)


def test_promoted_order_beats_the_most_requested_one():
    driver = driver_for()
    for _ in range(2):
        ask(driver, fixed("dcb"), reuse="modular")
    work_off(driver.engine.promoter)
    for _ in range(4):
        ask(driver, free("ab"), reuse="modular")
    assert order_of(ask(driver, free("bcd"), reuse="modular")) == "dcb"


@pytest.mark.parametrize("reuse", ["exact", "modular"])
def test_all_answers_and_preempted_requests_keep_their_order(reuse):
    driver = driver_for(kv_tokens=300, max_model_len=320)  # so the primer is short
    ask(driver, fixed("ba", "Before?"))
    requests = [driver.request(free("ab", f"{n}?"), 60, reuse=reuse, n=2, temperature=1.0) for n in range(3)]
    driver.add(*requests)
    taken = {}
    while driver.engine.busy:
        driver.step()
        for request in requests:
            if request.usage is not None:
                order = taken.setdefault(request.id, order_of(request))
                assert order == order_of(request)
    assert any(member.preemptions for request in requests for member in request.family)
    for request in requests:
        assert request.failure is None
        assert all(member.ids == request.ids for member in request.family)
        if reuse == "exact":
            assert order_of(request) == "ba"
            for member in request.family:
                check_stock(driver, member)


def test_a_batch_of_free_and_fixed_orders():
    driver = driver_for()
    ask(driver, fixed("dba", "Once?"))
    batch = [
        driver.request(made, reuse="exact") for made in (free("abd"), fixed("abd"), free("cd"), free("bd", "Other?"))
    ]
    driver.run(*batch)
    assert [order_of(request) for request in batch] == ["dba", "", "dc", "db"]
    for request in batch:
        check_stock(driver, request)


def test_consecutive_and_nested_sets_are_ordered():
    schema = Schema.from_string(
        f'<schema name="s"><module name="n">Outer. <module name="x">An inner module.</module>'
        f'<module name="y">Another inner one.</module></module>Between.{MODULES}</schema>'
    )
    driver = Driver()
    driver.schema(schema)
    ask(driver, schema.prompt().use("n", "New. ", use("y"), use("x")).use("b").use("a").text("?"))
    ask(driver, schema.prompt().use("n", use("y"), use("x")).use("b").use("a").text("?"))
    both = schema.prompt().use("n", any_order("x", "y")).any_order("a", "b", "c").text("So?")
    request = ask(driver, both)
    assert [member.name for each in request.prompt.request.sets for member in each.members] == [
        *("n/y", "n/x"),
        *("b", "a", "c"),
    ]
    check_stock(driver, request)
    moved = ask(driver, schema.prompt().use("n", any_order("x", "y")).any_order("c", "a").text("So?"))
    assert order_of(moved).startswith("n/yn/x")
    check_stock(driver, moved)


def test_sets_with_arguments_unions_and_uncached_members():
    schema = Schema.from_string(
        '<schema name="s">Front.<module name="p">A <param name="x" len="9"/> that is filled '
        '<param name="y" len="5" default="so"/>.</module><union><module name="u">One member.</module>'
        '<module name="v">The other one.</module></union>'
        '<module name="w" cache="false">What is never kept.</module><module name="z"></module></schema>'
    )
    driver = Driver()
    driver.schema(schema)
    ask(driver, schema.prompt().use("v").use("p", x="thing").use("w").text("?"))
    made = schema.prompt().any_order(use("w"), use("p", "New text inside. ", x="thing"), use("z"), use("v")).text("?")
    for reuse in ("exact", "modular"):
        request = ask(driver, made, reuse=reuse)
        assert sorted(order_of(request)) == sorted("wpzv")
        if reuse == "exact":
            assert order_of(request).strip("z")[0] == "v"
            check_stock(driver, request)
    assert "thing" in text_of(driver, request)


def test_parts_of_messages_can_be_ordered():
    llm = LLM(tiny("llama"), seed=0, chunk_size=4, max_pass_s=None)
    marked = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in TEXTS.values()]
    question = {"type": "text", "text": "Which?"}

    def messages(*numbers: int, **more):
        return [{"role": "user", "content": [*(marked[number] for number in numbers), question], **more}]

    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def answer(made, **asked):
        return llm.generate([made], params, **{"reuse": "exact", **asked})[0]

    answer(messages(2, 0, 1))
    output = answer(messages(0, 1, 2, order="any"))
    names = tuple(f"messages[0].content[{number}]" for number in (2, 0, 1))
    assert [(each.members, each.why_fixed) for each in output.order] == [(names, None)]
    assert output.usage.computed_tokens == 1
    assert TEXTS["c"] + TEXTS["a"] + TEXTS["b"] + "Which?" in output.prompt
    assert llm.tokenizer.decode(list(output.prompt_token_ids)) == output.prompt
    assert answer(messages(0, 1, 2), order="any").order == output.order
    modular = answer(messages(0, 1, 2, order="any"), reuse="modular")
    assert sorted(modular.order[0].members) == sorted(names)
    (alone,) = answer(messages(0, order="any")).order
    assert alone.members == ("messages[0].content[0]",)
    assert alone.why_fixed == "no two neighbouring parts of its message are marked with cache_control"
    (text,) = answer([{"role": "user", "content": "Well?", "order": "any"}]).order
    assert (text.members, text.why_fixed) == ((), alone.why_fixed)
    assert answer([{"role": "user", "content": "Well?"}], order="any").order == (text,)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"reuse": "off"}, "reuse 'off' is the same whatever is stored"),
        ({"reuse": "anchored"}, "reuse 'anchored' is the same whatever is stored"),
        ({"reuse": "modular+promote:off"}, "reuse 'modular+promote:off' is the same whatever is stored"),
        ({"positions": "schema"}, "under positions 'schema' modules stand where their schema has them"),
        (
            {"prompt_logprobs": 0},
            "all of a prompt is computed where prompt_logprobs or the mean of hidden states is asked for",
        ),
    ],
)
def test_fixed_order_gives_its_reason(asked, why):
    driver = driver_for()
    ask(driver, fixed("ab"))
    request = ask(driver, free("ba"), **asked)
    (each,) = request.prompt.request.sets
    assert each.why_fixed == why
    assert order_of(request) == ("ab" if "positions" in asked else "ba")


def test_text_between_members_fixes_their_order():
    schema = Schema.from_string(
        '<schema name="s"><module name="a">A</module>between<module name="b">B</module></schema>'
    )
    llm = LLM(tiny("llama"), seed=0)
    llm.add_schema(schema)
    (output,) = llm.generate(schema.prompt().any_order("b", "a").text("?"), SamplingParams(max_tokens=1))
    (each,) = output.order
    assert each.members == ("a", "b")
    assert each.why_fixed == "the schema has text, a parameter or a turn's border between them"
    assert output.prompt.endswith("AbetweenB?")


def test_sets_survive_serialisation():
    driver = driver_for()
    made = driver.llm.processor.process(free("cab"), SamplingParams(max_tokens=1), driver.llm.policy("exact"))
    read = EngineRequest.from_bytes(made.to_bytes(), driver.llm.client.model.keys)
    assert read.sets == made.sets
    for order in permutations(range(3)):
        turned = read.ordered([order])
        assert turned.positions == made.positions
        assert turned.text == made.ordered([order]).text
        assert [member.name for member in turned.sets[0].members] == ["cab"[number] for number in order]
        assert driver.llm.tokenizer.decode(list(turned.ids)).endswith(turned.text[-20:])


def test_work_of_choosing_an_order_is_bounded():
    names = [f"m{number}" for number in range(64)]
    schema = Schema.from_string(
        "<schema name='s'>Front."
        + "".join(f'<module name="{name}">Text of {name}.</module>' for name in names)
        + "</schema>"
    )
    driver = Driver(record=False, kv_tokens=8000)
    driver.schema(schema)
    asked = driver.request(schema.prompt().any_order(*names).text("?"), reuse="modular")
    looks = 0
    follow = driver.store.follow

    def counted(*given):
        nonlocal looks
        looks += 1
        return follow(*given)

    driver.store.follow = counted
    orders = OrderChooser(driver.store).choose(asked.prompt.request)
    assert sorted(orders[0]) == list(range(64))
    assert looks <= 1_100


def many_sets(sets: int, text: str = "Of {}.") -> tuple[Driver, object]:
    """A driver with a schema of two modules for each set, and a prompt of all of them."""
    modules = "".join(f'<module name="m{n}">{text.format(n)}</module>' for n in range(2 * sets))
    schema = Schema.from_string(f'<schema name="s">Front.{modules}</schema>')
    driver = Driver(record=False, kv_tokens=20_000)
    driver.schema(schema, encode=False)
    built = schema.prompt()
    for n in range(sets):
        built = built.any_order(f"m{2 * n}", f"m{2 * n + 1}").text(" ")
    return driver, built.text("?")


@pytest.mark.parametrize("reuse", ["exact", "modular"])
def test_work_of_choosing_grows_linearly_with_the_sets(reuse):
    driver, prompt = many_sets(10)
    ask(driver, prompt, reuse=reuse)  # the first request is not counted

    def calls(sets: int) -> int:
        driver, prompt = many_sets(sets, "x")
        asked = driver.request(prompt, reuse=reuse).prompt.request
        chooser, count = OrderChooser(driver.store), 0

        def called(_frame, event, _argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(called)
        try:
            chooser.asked(asked.ordered(chooser.choose(asked)))
        finally:
            sys.setprofile(None)
        return count

    few, many = calls(25), calls(100)
    assert many < 6 * few, "four times the sets; where each looks at all parts it is ten times as many and more"


def test_lookup_budget_is_shared_by_all_sets(monkeypatch):
    driver, prompt = many_sets(20)
    asked = driver.request(prompt, reuse="exact").prompt.request
    chooser = OrderChooser(driver.store)
    for _ in range(3):
        chooser.asked(asked.ordered([(1, 0)] * 20))
    assert chooser.choose(asked) == ((1, 0),) * 20
    monkeypatch.setattr(order_module, "MOST_FOR_ALL", 40)
    orders = chooser.choose(asked)
    assert orders[0] == (1, 0)
    assert orders[-1] == (0, 1)


def test_waiting_request_stops_choosing_after_its_budget(monkeypatch):
    monkeypatch.setattr(order_module, "MOST_WORK", 100)
    driver = driver_for(encode=False)
    request, chosen = driver.request(free("abcd"), reuse="exact"), 0
    chooser = driver.engine.kv_manager.orders

    class Changing(OrderChooser):
        version = property(lambda _: object())

        def choose(self, *given):
            nonlocal chosen
            chosen += 1
            return chooser.choose(*given)

    manager = driver.engine.kv_manager
    for _ in range(50):
        request.prompt.choose(
            lambda specs: frozenset(), lambda run: 0, manager.profiles, Changing(driver.store), driver.store
        )
    assert 1 < chosen < 10


def test_modules_without_tokens_can_be_ordered():
    modules = "".join(f'<module name="m{n}"></module>' for n in range(40))
    schema = Schema.from_string(f'<schema name="s">Front.{modules}{MODULES}</schema>')
    driver = Driver()
    driver.schema(schema)
    names = [f"m{n}" for n in range(40)]
    for reuse in ("exact", "modular"):
        assert sorted(order_of(ask(driver, schema.prompt().any_order(*names, "a").text("?"), reuse=reuse))) == sorted(
            "".join(names) + "a"
        )


def test_too_many_sets_are_rejected():
    driver, prompt = many_sets(MAX_SETS + 1, "x")
    with raises("prompt.too_many_sets", ParameterError, names="257"):
        driver.request(prompt, reuse="exact")
    asked = driver.request(prompt, reuse="off").prompt.request
    assert len(asked.sets) == MAX_SETS + 1, "none of them is free"


def test_request_counts_are_bounded_and_per_salt():
    counts = RequestCounts()
    counts.ask("one", [b"x", b"x", b"y"])
    assert (counts.of("one", b"x"), counts.of("one", b"y"), counts.of("two", b"x")) == (2, 1, 0)
    counts.ask("two", [str(number).encode() for number in range(MOST_NODES + 10)])
    assert counts.of("one", b"x") == 2, "who has most gives way"
    assert counts.of("two", b"0") == 0
    for number in range(300):
        counts.ask(f"salt {number}", [b"z"])
    assert (counts.of("salt 0", b"z"), counts.of("salt 299", b"z")) == (0, 1)
    assert counts.of("one", b"x") == 2, "many who come once do not push out who comes again"
