"""Composed prompts against Prompt Cache done with the stock model: contexts, gaps, shifts, parameters, batches."""

from __future__ import annotations

import pytest

from inlay import Prompt, Schema
from inlay.models.load import LoadedModel
from inlay.pml import resolve
from inlay.policy import ReusePolicy
from inlay.prompt.layout import TextRun
from inlay.prompt.placement import lay_out_prompt
from tests.conftest import CONFIGS, tiny
from tests.generated import in_pairs
from tests.model.equivalence.oracle import PromptCacheOracle
from tests.model.equivalence.recorder import Recorder, close

SCHEMA = """
<schema name="s">Words that always stand in front of all.
<module name="trip">We travel for <param name="days" len="9" default="a week"/> and we like
  <param name="likes" len="12"/> most of all.
  <union>
    <module name="miami">Miami has beaches and a long street of houses.</module>
    <module name="maui">Maui has two volcanoes, <param name="when" len="6" default="now"/> as ever.</module>
  </union>
  These were the places.
</module>
Words that always stand between.
<module name="money">We can spend a little.</module>
<module name="food">We would rather eat well once.</module>
<scaffold modules="money food"/>
</schema>
"""

PROMPTS = {
    "one module": lambda p: p.use("money").text("Where to?"),
    "order and gaps": lambda p: p.use("trip", likes="tea").use("food").text("Where to?"),
    "nested, short and full arguments": lambda p: (
        p.use("trip", use("miami"), days="3 days", likes="twelve chars").use("money").text("Where to?")
    ),
    "defaults": lambda p: p.use("trip", use("maui"), likes="").text("Where to?"),
    "new text in the middle": lambda p: p.use("trip", use("maui", when="soon"), likes="sun").text("Well.").use("food"),
    "a scaffold": lambda p: p.use("money").use("food").text("Where to?"),
    "ends in a module": lambda p: p.use("trip", likes="rain").use("food"),
}
POLICIES = [(r, p) for r in ("isolated", "anchored", "primed") for p in ("schema", "packed")]


def use(name, *children, **arguments):
    import inlay

    return inlay.use(name, *children, **arguments)


def oracle_logits(
    loaded: LoadedModel,
    llm,
    prompt,
    answer: list[int],
    reuse: str,
    positions: str,
    recomputed=None,
    make_oracle=PromptCacheOracle,
):
    """The logits of every answer token, from modules encoded by the stock model one at a time.

    recomputed: offsets of tokens to recompute in place, by the start of their part.
    """
    processor = llm.processor
    written = prompt if isinstance(prompt, Prompt) else prompt.build()
    layout = llm.schema(written.schema)
    resolved = resolve(layout.schema, written, moves=True)
    placed = lay_out_prompt(resolved, layout, processor.encoder, processor.template, packed=positions == "packed")
    oracle = make_oracle(loaded)
    parts = list(placed.parts)
    for number, part in enumerate(parts):
        if part.origin is None:
            oracle.add_fresh(list(part.ids), part.start)
            continue
        chain = chain_of(layout, part.origin, reuse, placed.imported)
        primer = processor.schemas.primer(ReusePolicy.parse(reuse))
        context, own = at_positions(layout, chain, part, positions, primer)
        last = number == len(parts) - 1  # the last token is always computed over the whole prompt
        oracle.add_module(context, own[:-1] if last else own, part.start) if own[last:] else None
        if offsets := (recomputed or {}).get(part.start):
            oracle.recompute([own[offset][0] for offset in offsets], [part.start + offset for offset in offsets])
        if last:
            oracle.add_fresh([own[-1][0]], part.start + len(own) - 1)
    end = placed.parts[-1].end
    for step, token in enumerate(answer[:-1]):
        oracle.add_fresh([token], end + step)
    return oracle.logits[-len(answer) :]


def chain_of(layout, entry, reuse: str, imported: frozenset[str]) -> list:
    """The context that the entry is encoded after, by the rules of the design."""
    scaffold = {"money", "food"} if {"money", "food"} <= imported else set()

    def visible(owner) -> bool:
        if owner == entry.owner:
            return True
        if entry.owner and owner and {owner[-1], entry.owner[-1]} <= scaffold:
            return True
        return reuse in ("anchored", "primed") and entry.owner[: len(owner)] == owner

    return [other for other in layout.entries[: entry.index] if visible(other.owner)]


def at_positions(layout, chain, part, positions: str, primer):
    """(id, position) of the context's tokens and of the part's own, as they are encoded.

    The primer stands in front of the first text of a module, which moves by the primer's length.
    """
    spots, at, context = {}, 0, []
    left = list(primer)
    for entry in [*chain, part.origin]:
        here = (entry.start if positions == "schema" else at) + len(primer) - len(left)
        if left and entry.owner:
            context += [(token, here + offset) for offset, token in enumerate(left)]
            here, left = here + len(left), []
        spots[entry.index] = here
        at += len(entry.ids) if isinstance(entry, TextRun) else entry.length
        if isinstance(entry, TextRun) and entry is not part.origin:
            context += [(token, here + offset) for offset, token in enumerate(entry.ids)]
    own = [(token, spots[part.origin.index] + offset) for offset, token in enumerate(part.ids)]
    return context, own


@pytest.mark.parametrize(("which", "name", "policy"), in_pairs(PROMPTS, CONFIGS, POLICIES))
def test_composed_prompt_equals_prompt_cache(which, name, policy):
    reuse, positions = policy
    if name == "gpt2" and positions == "packed":
        return  # refused, see test_learned_positions_allow_no_shift
    loaded = tiny(name)
    recorder = Recorder(loaded, reuse=reuse, positions=positions)
    schema = Schema.from_string(SCHEMA)
    recorder.llm.add_schema(schema)
    if which == "new text in the middle" and positions == "schema":
        return  # there is no gap after the trip's last words; see test_new_text_in_a_gap
    prompt = PROMPTS[which](schema.prompt())
    for _ in range(2):  # a second time everything comes from the store
        ((output, logits),) = recorder.greedy([prompt])
        expected = oracle_logits(loaded, recorder.llm, prompt, list(output.outputs[0].token_ids), reuse, positions)
        for step, row in enumerate(expected):
            close(logits[step], row)
    assert output.usage.cached_tokens > output.usage.computed_tokens


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("reuse", ["isolated", "anchored"])
def test_new_text_in_a_gap(name, reuse):
    """New text fills the place of a module that was not imported; later modules do not see it, later new text does."""
    loaded = tiny(name)
    recorder = Recorder(loaded, reuse=reuse, positions="schema")
    schema = Schema.from_string(
        '<schema name="s"><module name="a">The first one.</module><module name="b">The second module.</module>'
        '<module name="c">And the third.</module></schema>'
    )
    recorder.llm.add_schema(schema)
    prompt = schema.prompt().use("a").text("In the gap").use("c").text("Go on")
    ((output, logits),) = recorder.greedy([prompt])
    expected = oracle_logits(loaded, recorder.llm, prompt, list(output.outputs[0].token_ids), reuse, "schema")
    for step, row in enumerate(expected):
        close(logits[step], row)


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize("budget", [3, 4096])
def test_chunk_sizes_and_chunked_encoding(chunk_size, budget):
    loaded = tiny("qwen3")
    recorder = Recorder(loaded, reuse="anchored", chunk_size=chunk_size, max_num_batched_tokens=budget)
    schema = Schema.from_string(SCHEMA)
    recorder.llm.add_schema(schema)
    prompt = PROMPTS["nested, short and full arguments"](schema.prompt())
    ((output, logits),) = recorder.greedy([prompt])
    expected = oracle_logits(loaded, recorder.llm, prompt, list(output.outputs[0].token_ids), "anchored", "packed")
    for step, row in enumerate(expected):
        close(logits[step], row)


@pytest.mark.parametrize("reuse", ["isolated", "anchored"])
def test_one_copy_serves_several_shifts_in_one_batch(rotary_model, reuse):
    """One physical copy serves sequences that read it at different offsets, in the same batch, in any order."""
    recorder = Recorder(rotary_model, reuse=reuse)
    schema = Schema.from_string(
        '<schema name="s">'
        + "".join(f'<module name="m{n}">Module {n} says {"word " * (n + 2)}.</module>' for n in range(4))
        + "</schema>"
    )
    recorder.llm.add_schema(schema)
    stored = recorder.llm.store.tokens
    prompts = []
    for order in ("0123", "3210", "2", "13", "31"):
        prompt = schema.prompt()
        for module in order:
            prompt = prompt.use(f"m{module}")
        prompts.append(prompt.text("And?"))
    outputs = recorder.greedy(prompts, tokens=10)
    own = sum(len("And?") + len(output.outputs[0].token_ids) - 1 for output, _ in outputs)
    assert recorder.llm.store.tokens == stored + own  # no module was stored again at another offset
    assert {output.usage.computed_tokens for output, _ in outputs} == {4}
    for prompt, (output, logits) in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        for step, row in enumerate(oracle_logits(rotary_model, recorder.llm, prompt, answer, reuse, "packed")):
            close(logits[step], row)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("reuse", ["isolated", "anchored", "exact"])
def test_unselected_text_changes_nothing(name, reuse):
    """Invariant 2: under ``schema`` positions only the length of unselected text can matter."""
    loaded = tiny(name)
    positions = ["schema"] if name == "gpt2" and reuse != "exact" else ["schema", "packed"]
    for position in positions:
        seen = []
        for filler in ("The hidden words", "Quite other ones"):
            schema = Schema.from_string(SCHEMA.replace("We can spend a little.", filler + " here."))
            # Passes that are cut by the clock differ in rounding, and so do drafts, which depend on measured times.
            recorder = Recorder(loaded, reuse=reuse, positions=position, max_pass_s=None, speculation="off")
            recorder.llm.add_schema(schema)
            ((_, logits),) = recorder.greedy([schema.prompt().use("trip", likes="tea").use("food").text("Where to?")])
            seen.append(logits)
        assert seen[0].equal(seen[1])


def test_packed_positions_do_not_depend_on_unselected_lengths():
    seen = []
    for filler in ("Short.", "Very much longer than it was before, and longer still."):
        schema = Schema.from_string(SCHEMA.replace("We can spend a little.", filler))
        recorder = Recorder(tiny("llama"))
        recorder.llm.add_schema(schema)
        ((_, logits),) = recorder.greedy([schema.prompt().use("trip", likes="tea").use("food").text("Where to?")])
        seen.append(logits)
    close(seen[0], seen[1])  # where segments lie in the pool moves the last bits


def test_request_does_not_depend_on_its_batch(rotary_model):
    recorder = Recorder(rotary_model)
    schema = Schema.from_string(SCHEMA)
    recorder.llm.add_schema(schema)
    prompts = [build(schema.prompt()) for build in PROMPTS.values()]
    alone = [recorder.greedy([prompt], tokens=12)[0] for prompt in prompts]
    together = recorder.greedy(prompts, tokens=12)
    for (_, one), (_, other) in zip(alone, together, strict=True):
        close(one, other)


def test_the_papers_placeholders():
    """With placeholders="unk" a module is encoded over <unk> tokens whose states are dropped (section 3.3)."""
    loaded = tiny("llama")
    recorder = Recorder(loaded, reuse="isolated", positions="schema", placeholders="unk")
    schema = Schema.from_string(
        '<schema name="s"><module name="a">Go for <param name="days" len="6"/> to the sea.</module></schema>'
    )
    recorder.llm.add_schema(schema)
    ((output, logits),) = recorder.greedy([schema.prompt().use("a", days="3 days").text("Yes?")], tokens=1)
    encoder, unk = recorder.llm.encoder, loaded.tokenizer.unk_token_id
    head, tail = encoder.text("Go for "), encoder.text(" to the sea.")
    whole = [*head, *[unk] * 6, *tail]
    oracle = PromptCacheOracle(loaded)
    oracle.add_module([], list(zip(head, range(7), strict=True)), 0)
    oracle.add_fresh(list(encoder.text("3 days")), 7)
    oracle.add_module([(t, i) for i, t in enumerate(whole[:13])], [(t, 13 + i) for i, t in enumerate(tail)], 13)
    oracle.add_fresh(list(encoder.text("Yes?")), 13 + len(tail))
    close(logits[0], oracle.logits[-1])
    assert unk not in output.prompt_token_ids
