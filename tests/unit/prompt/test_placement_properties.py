"""Properties of every schema and every prompt."""

from __future__ import annotations

import logging
from xml.sax.saxutils import escape, quoteattr

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inlay.errors import InlayError
from inlay.models.shapes import bytes_tokenizer
from inlay.pml import Prompt, Schema, TurnStart, resolve
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.layout import Hole, SchemaLayout, TextRun, lay_out_schema
from inlay.prompt.placement import PromptLayout, lay_out_prompt
from inlay.prompt.tokens import TextEncoder
from tests.generated import examples
from tests.tokenizers_for_tests import family

TOKENIZERS = {
    "bytes": bytes_tokenizer(),
    **{name: family(name) for name in ("qwen2.5", "qwen3", "llama3", "bare", "lower")},
}
ENCODERS = {name: TextEncoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}
TEMPLATES = {name: ChatTemplate(tokenizer) for name, tokenizer in TOKENIZERS.items()}
WORDS = st.sampled_from(["a", "The ferry", " ", "\n", " x\n", "é", "<|im_end|>", "<|end|>", "</think>", "A\n\nb "])
TEXT = st.lists(WORDS, min_size=1, max_size=3).map("".join)
SHAPES = ("plain", "turns", "turns around imports")
ROLES = st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=3)


class Writer:
    """Draws a schema and a prompt for it, in order."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.names = 0

    def maybe(self, text: str) -> str:
        return text if self.draw(st.booleans()) else ""

    def text(self) -> str:
        return escape(self.draw(TEXT))

    def name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def level(self, depth: int, kinds: list[str]) -> tuple[str, str, str]:
        """Return a level of a schema, its part of the prompt, and the arguments of its parameters."""
        schema = prompt = arguments = ""
        for kind in self.draw(st.lists(st.sampled_from(kinds), max_size=4)):
            if kind == "text":
                schema += self.text()
            elif kind == "param":
                hole, argument = self.param()
                schema, arguments = schema + hole, arguments + argument
            elif depth:
                members = [
                    self.module(depth - 1) for _ in range(self.draw(st.integers(1, 3)) if kind == "union" else 1)
                ]
                inner = "".join(member for member, _ in members)
                schema += f"<union>{inner}</union>" if kind == "union" else inner
                prompt += self.maybe(self.draw(st.sampled_from(members))[1])
            if self.draw(st.integers(0, 5)) == 0:
                prompt += self.text()
        return schema, prompt, arguments

    def module(self, depth: int) -> tuple[str, str]:
        name = self.name()
        schema, prompt, arguments = self.level(depth, ["text", "text", "param", "module", "union"])
        return f'<module name="{name}">{schema}</module>', f"<{name}{arguments}>{prompt}</{name}>"

    def param(self) -> tuple[str, str]:
        name, default = self.name(), self.maybe(f" default={quoteattr(self.draw(TEXT)[:2])}")
        argument = f" {name}={quoteattr(self.draw(TEXT))}"
        length = self.draw(st.integers(4, 25))
        return f'<param name="{name}" len="{length}"{default}/>', self.maybe(argument) if default else argument

    def case(self, shape: str) -> tuple[str, str]:
        schema = prompt = ""
        if shape == "turns of modules":
            return self.turns_of_modules()
        if shape == "plain":
            schema, prompt, _ = self.level(3, ["text", "text", "module", "union"])
            return schema, prompt
        if shape == "turns around imports":
            for role in self.draw(ROLES):
                inner, said, _ = self.level(2, ["module", "union"])
                schema, prompt = schema + inner, prompt + f'<{role} xml:space="preserve">{said}</{role}>'
            return schema, prompt
        for role in self.draw(ROLES):
            inner, said, _ = self.level(2, ["text", "text", "module", "union"])
            schema, prompt = schema + f"<{role}>{inner}</{role}>", prompt + said
        for role in self.draw(ROLES) if self.draw(st.booleans()) else []:
            prompt += f'<{role} xml:space="preserve">{self.maybe(self.text())}</{role}>'
        return schema, prompt

    def turns_of_modules(self) -> tuple[str, str]:
        """Turns in modules and outside, and text and modules beside them."""
        schema = prompt = ""
        for _ in range(self.draw(st.integers(1, 4))):
            name, inner, said, given = self.name(), "", "", ""
            for role in ["", *self.draw(ROLES)]:
                level, imports, arguments = self.level(1, ["text", "param", "module"])
                inner += f"<{role}>{level}</{role}>" if role else level
                said, given = said + imports, given + arguments
            schema += f'<module name="{name}">{inner}</module>'
            prompt += self.maybe(f"<{name}{given}>{said}</{name}>")
            if self.draw(st.booleans()):
                role, (level, imports, _) = self.draw(ROLES)[0], self.level(1, ["text", "module"])
                schema, prompt = schema + f"<{role}>{level}</{role}>{self.maybe(self.text())}", prompt + imports
        return schema, prompt + self.maybe(f"<user>{self.text()}</user>")


@st.composite
def cases(draw: st.DrawFn, shapes: tuple[str, ...] = (*SHAPES, "turns of modules")) -> tuple[str, str]:
    space = draw(st.sampled_from(["", ' xml:space="preserve"']))
    schema, prompt = Writer(draw).case(draw(st.sampled_from(shapes)))
    return f'<schema name="s"{space}>{schema}</schema>', f'<prompt schema="s">{prompt}</prompt>'


def placed_in(layout: SchemaLayout, prompt: Prompt, name: str, positions: str) -> PromptLayout | None:
    try:
        resolved = resolve(layout.schema, prompt, moves=False)
        return lay_out_prompt(resolved, layout, ENCODERS[name], TEMPLATES[name], packed=positions == "packed")
    except InlayError:
        return None


def check_layout(layout: SchemaLayout) -> None:
    ends = [0]
    for number, entry in enumerate(layout.entries):
        end = entry.end if isinstance(entry, TextRun) else entry.start + entry.length
        assert entry.index == number
        assert entry.start <= max(ends)  # no position between entries is left out
        assert entry.start < end
        if entry.owner:
            extent = layout.extents["/".join(entry.owner)]
            assert extent.start <= entry.start
            assert end <= extent.end
        ends.append(end)
    assert layout.length == max(ends)


def check_prompt(placed: PromptLayout, name: str, *, turnless: bool) -> None:
    bos = TOKENIZERS[name].decode(ENCODERS[name].bos)
    decoded = TOKENIZERS[name].decode(placed.ids)
    assert decoded == bos + placed.text or (not turnless and decoded == placed.text)
    assert not bos or decoded.count(bos) - placed.text.count(bos) in (0, 1)
    assert list(placed.positions) == sorted(set(placed.positions))
    for part in placed.parts:
        assert part.ids
        if part.origin is not None:
            assert part.ids == (part.origin.default if isinstance(part.origin, Hole) else part.origin.ids)
    for one, other in zip(placed.parts, placed.parts[1:], strict=False):
        assert one.origin or other.origin or one.end < other.start  # text of the request is in one piece


@pytest.mark.parametrize("name", list(TOKENIZERS))
@given(case=cases())
@settings(max_examples=examples(120), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_prompt(name: str, case: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    try:
        layout = lay_out_schema(Schema.from_string(case[0]), ENCODERS[name], TEMPLATES[name])
        prompt = Prompt.from_string(case[1])
    except InlayError:
        return
    check_layout(layout)
    turnless = not any(f"<{role}" in text for role in ("system", "user", "assistant") for text in case)
    fixed, packed = (placed_in(layout, prompt, name, positions) for positions in ("schema", "packed"))
    if fixed is not None:
        check_prompt(fixed, name, turnless=turnless)
        assert all(part.origin is None or part.start == part.origin.start for part in fixed.parts)
        assert packed is not None  # a layout that fits with gaps fits without them
        assert packed.ids == fixed.ids
        assert packed.text == fixed.text
    if packed is not None:
        check_prompt(packed, name, turnless=turnless)
        assert packed.positions == tuple(range(len(packed.ids)))
        read = [part.origin for part in packed.parts if part.origin is not None]
        for always in (True, False):  # text outside modules may end a turn in front of a module that begins another
            order = [one.index for one in read if (not one.owner) == always]
            assert order == sorted(set(order))


@pytest.mark.long
@given(case=cases(SHAPES))
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
def test_prompt_without_a_warning_equals_its_template(case: tuple[str, str]) -> None:
    """The text of a prompt of turns, rendered in one go, unless a warning said that it differs."""
    template = ChatTemplate(TOKENIZERS["llama3"])
    try:
        layout = lay_out_schema(Schema.from_string(case[0]), ENCODERS["llama3"], template)
        resolved = resolve(layout.schema, Prompt.from_string(case[1]))
        placed = lay_out_prompt(resolved, layout, ENCODERS["llama3"], template, packed=True)
    except InlayError:
        return
    starts = [item for item in resolved.items if isinstance(item, TurnStart)]
    if not starts or any("strips, merges" in kind for kind in template.warned):
        return
    generation = not (starts[-1].own and starts[-1].role == "assistant")
    pieces = template.pieces([start.role for start in starts], generation=generation)
    rest = placed.text + ("" if generation else pieces[-1])
    messages = []
    for start, piece, following in zip(starts, pieces[:-1], pieces[1:], strict=True):
        body, _, rest = rest.removeprefix(piece).partition(following)
        rest = following + rest
        messages.append({"role": start.role, "content": body})
    assert template.render(messages, generation=generation) == placed.text + ("" if generation else pieces[-1])
    assert all(message["content"] == message["content"].strip() for message in messages)
