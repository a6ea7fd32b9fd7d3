"""Messages in parts: modules that a request marks, and text that is found by its content."""

from __future__ import annotations

import pytest
import torch

from inlay import LLM, Prompt, SamplingParams, Schema
from tests.conftest import tiny

SYSTEM = "Answer from the documents."
DOCUMENTS = [
    f"Document {name}: the {name} lies between two rivers. " for name in ("town", "harbour", "mountain", "bridge")
]
QUESTION = "Where does it lie?"
ONE = SamplingParams(temperature=0, max_tokens=1)
EPHEMERAL = {"type": "ephemeral"}
SCHEMA = Schema.from_string(
    f"<schema name='s'><system>{SYSTEM}</system><user>"
    + "".join(f"<module name='m{i}'>{text}</module>" for i, text in enumerate(DOCUMENTS))
    + "</user></schema>"
)


def part(text: str, *, marked: bool = False) -> dict:
    return {"type": "text", "text": text} | ({"cache_control": EPHEMERAL} if marked else {})


def conversation(*order: int, marked: bool = True) -> list[dict]:
    documents = [part(DOCUMENTS[i], marked=marked) for i in order]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": [*documents, part(QUESTION)]}]


def with_schema(*order: int) -> Prompt:
    return Prompt.from_string(f"<prompt schema='s'>{''.join(f'<m{i}/>' for i in order)}{QUESTION}</prompt>")


def make(name: str = "llama", **settings) -> LLM:
    return LLM(tiny(name), kv_memory="16MiB", seed=0, **settings)


def ids_of(llm: LLM, order) -> tuple[int, ...]:
    return llm.lay_out(conversation(*order)).ids


@pytest.mark.parametrize("reuse", ["isolated", "anchored"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0), (3, 1, 0, 2)])
def test_marked_parts_are_what_modules_of_a_schema_are(reuse, order):
    """The system turn is to them what text outside modules is to a schema: the same tokens, the same states."""
    parts, schema = make(reuse=reuse), make(reuse=reuse)
    schema.add_schema(SCHEMA)
    say = [[5, 6, 7]]
    assert ids_of(parts, order) == schema.lay_out(with_schema(*order)).ids
    (got,), (expected,) = (
        parts.distributions([conversation(*order)], say),
        schema.distributions([with_schema(*order)], say),
    )
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    (exact,) = parts.distributions([conversation(*order)], say, reuse="exact")
    assert not torch.allclose(got, exact, atol=1e-3)


def test_marked_parts_are_found_in_any_order_and_by_any_prompt():
    llm = make()
    first = llm.generate(conversation(0, 1, 2), ONE)[0].usage
    assert (first.module_tokens, first.exact_tokens) == (0, 0)
    usage = llm.generate(conversation(2, 0), ONE)[0].usage
    ids = [len(llm.encoder.text(DOCUMENTS[i])) for i in range(4)]
    assert usage.module_tokens == usage.shifted_tokens == ids[0]
    assert usage.exact_tokens >= ids[2]  # the first one stands right behind all that it has seen
    llm.add_schema(SCHEMA, encode=False)
    usage = llm.generate(with_schema(3, 1), ONE)[0].usage  # the schema's module is the same text in the same context
    assert usage.module_tokens == usage.shifted_tokens == ids[1]


def test_parts_that_nobody_marked_are_looked_up_and_leave_no_module():
    llm = make()
    llm.add_schema(SCHEMA)
    ids = [len(llm.encoder.text(text)) for text in DOCUMENTS]
    other = "Document lake: nobody has stored this one anywhere. "
    messages = conversation(2, 0, marked=False)
    messages[1]["content"].insert(1, part(other))
    usage = llm.generate(messages, ONE, reuse="modular")[0].usage
    assert usage.module_tokens == ids[0]
    assert usage.exact_tokens >= ids[2]  # right behind all that it has seen
    assert usage.computed_tokens >= len(llm.encoder.text(other))
    again = conversation(1, marked=False)
    again[1]["content"].insert(1, part(other))
    usage = llm.generate(again, ONE, reuse="modular")[0].usage
    assert usage.exact_tokens >= ids[1]
    assert usage.computed_tokens >= len(llm.encoder.text(other))


def test_an_exact_request_never_reads_a_module():
    llm = make(reuse="exact")
    llm.generate(conversation(0, 1, 2), ONE, reuse="anchored")
    usage = llm.generate(conversation(1, 0), ONE)[0].usage
    assert usage.module_tokens == usage.shifted_tokens == 0
    assert usage.exact_tokens < len(llm.lay_out(conversation(1, 0)).ids) - len(llm.encoder.text(DOCUMENTS[0]))
    assert llm.generate(conversation(1, 0), ONE)[0].usage.computed_tokens == 1


def test_exact_reuse_of_parts_equals_the_stock_model():
    llm = make(reuse="exact")
    ids = ids_of(llm, (0, 1))
    with torch.inference_mode():
        expected = llm.loaded.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
    for _ in range(2):
        (got,) = llm.distributions([conversation(0, 1)], [[5]])
        torch.testing.assert_close(got[0], expected, atol=1e-4, rtol=0)


def test_a_conversation_goes_on_over_its_parts():
    llm = make()
    messages = conversation(2, 0)
    (answer,) = llm.generate(messages, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    before = len(answer.prompt_token_ids)
    turns = [
        *messages,
        {"role": "assistant", "content": answer.outputs[0].text},
        {"role": "user", "content": "And why?"},
    ]
    usage = llm.generate(turns, ONE)[0].usage
    assert usage.cached_tokens >= before


def test_a_model_without_shifts_keeps_parts_at_their_positions():
    llm = make("gpt2")
    llm.generate(conversation(0, 1), ONE)
    usage = llm.generate(conversation(0, 2), ONE)[0].usage
    assert usage.cached_tokens >= len(llm.encoder.text(DOCUMENTS[0]))
    assert usage.shifted_tokens == 0
    moved = llm.generate(conversation(1, 0), ONE)[0].usage  # elsewhere it is another segment
    assert moved.cached_tokens < len(llm.encoder.text(DOCUMENTS[1])) + len(llm.encoder.text(SYSTEM))
