"""Generated schemas and prompts, against an oracle that walks the schema in the simplest way."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from random import Random
from xml.sax.saxutils import escape, quoteattr

from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.pml import Import, Module, Prompt, PromptBuilder, Schema, Turn, Union, resolve, use
from tests.generated import examples
from tests.unit.pml.helpers import shorthand


@dataclass
class Node:
    """A planned text, param, module, union or turn; the last four fields say how the prompt uses it."""

    kind: str
    label: str
    children: list["Node"] = field(default_factory=list)
    chosen: bool = False
    argument: str | None = None
    before: str = ""  # new text directly before a chosen module, after it, and at its end
    after: str = ""
    rest: str = ""


class Maker:
    """Makes a schema and a prompt from a source of randomness."""

    def __init__(self, random: Random, moves: bool) -> None:
        self.random = random
        self.moves = moves
        self.count = 0

    def label(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def words(self, letter: str) -> str:
        return f"{self.label(letter)}{self.random.choice(['', ' ', '<&>', ']]>', 'é😀', chr(10) + '  '])}"

    def level(self, depth: int, kinds: list[str]) -> list[Node]:
        """Children for one level; never two texts in a row, which would be one."""
        nodes: list[Node] = []
        for _ in range(self.random.randint(0, 5)):
            kind = self.random.choice(kinds)
            if kind == "text" and not (nodes and nodes[-1].kind == "text"):
                nodes.append(Node("text", self.words("t")))
            elif kind == "param":
                nodes.append(Node("param", self.label("p"), argument=self.random.choice([None, "", self.words("v")])))
            elif kind == "module" and depth:
                nodes.append(self.module(depth))
            elif kind == "union" and depth:
                members = [self.module(depth) for _ in range(self.random.randint(1, 3))]
                nodes.append(Node("union", "", members))
        return nodes

    def module(self, depth: int) -> Node:
        return Node("module", self.label("m"), self.level(depth - 1, ["text", "param", "module", "union"]))

    def choose(self, level: list[Node]) -> tuple[list[Node], str]:
        """Choose modules of a level and the new text around them: the level's children as the prompt has them."""
        if self.moves:
            level = [node for fixed, run in groupby(level, is_fixed) for node in self.shuffled(list(run), fixed)]
        chosen = []
        for node in level:
            member = self.random.choice(node.children) if node.kind == "union" else node
            if member.kind == "module" and self.random.random() < 0.6:
                member.chosen = True
                member.children, member.rest = self.choose(member.children)
                chosen.append(member)
        for number, node in enumerate(chosen):
            node.before = self.maybe_words() if number == 0 else ""
            node.after = self.maybe_words() if number + 1 < len(chosen) else ""
        return level, self.maybe_words()

    def shuffled(self, nodes: list[Node], fixed: bool) -> list[Node]:
        return nodes if fixed else self.random.sample(nodes, len(nodes))

    def maybe_words(self) -> str:
        return self.words("n") if self.random.random() < 0.4 else ""


def is_fixed(node: Node) -> bool:
    return node.kind not in ("module", "union")


def schema_xml(nodes: list[Node]) -> str:
    return "".join(map(node_xml, nodes))


def node_xml(node: Node) -> str:
    if node.kind == "text":
        return escape(node.label)
    if node.kind == "param":
        default = ' default="D"' if node.argument is None else ""
        return f'<param name="{node.label}" len="9"{default}/>'
    name = f' name="{node.label}"' if node.kind == "module" else ""
    tag = node.label if node.kind == "turn" else node.kind
    return f"<{tag}{name}>{schema_xml(node.children)}</{tag}>"


def chosen_in(level: list[Node]) -> Iterator[Node]:
    """The chosen modules of one level, turns and unions opened."""
    for node in level:
        if node.kind in ("union", "turn"):
            yield from chosen_in(node.children)
        elif node.chosen:
            yield node


def prompt_xml(level: list[Node], rest: str) -> str:
    written = ""
    for node in chosen_in(level):
        given_arguments = {child.label: child.argument for child in node.children if child.argument is not None}
        attributes = "".join(f" {key}={quoteattr(value)}" for key, value in given_arguments.items())
        inside = prompt_xml(node.children, node.rest)
        written += f"{escape(node.before)}<{node.label}{attributes}>{inside}</{node.label}>{escape(node.after)}"
    return written + escape(rest)


def built(level: list[Node], rest: str) -> Iterator[str | Import]:
    for node in chosen_in(level):
        arguments = {child.label: child.argument for child in node.children if child.argument is not None}
        yield node.before
        yield use(node.label, *built(node.children, node.rest), **arguments)
        yield node.after
    yield rest


def built_prompt(builder: PromptBuilder, level: list[Node], rest: str) -> Prompt:
    for part in built(level, rest):
        if isinstance(part, str):
            builder = builder.text(part)
        else:
            inner = {argument.name: argument.value for argument in part.arguments}
            builder = builder.use(part.name, *(as_part(child) for child in part.children), **inner)
    return builder.build()


def as_part(node: object) -> str | Import:
    return node if isinstance(node, Import) else node.text  # type: ignore[attr-defined]


def oracle(level: list[Node], rest: str) -> list[str]:
    """The expected text of the level in shorthand, new text at its end."""
    said: list[str] = []
    for node in level:
        if node.kind == "text":
            said.append(node.label)
        elif node.kind == "param":
            said.append("(D)" if node.argument is None else f"[{node.argument}]")
        elif node.kind == "turn":
            said += [f"<{node.label}", *oracle(node.children, ""), f"</{node.label}"]
        else:
            for member in chosen_in([node]):
                said += new(member.before) + oracle(member.children, member.rest) + new(member.after)
    return said + new(rest)


def new(text: str) -> list[str]:
    return [f"+{text}"] if text else []


def with_question(said: list[str], turns: list[Node], rest: str) -> list[str]:
    """The prompt's last text where the schema has turns."""
    if not rest:
        return said
    if turns[-1].label == "user":
        return [*said[:-1], f"+{rest}", said[-1]]
    return [*said, "+<user", f"+{rest}", "+</user"]


def check(nodes: list[Node], level: list[Node], rest: str, expected: list[str], moves: bool, schema_text: str) -> None:
    schema = Schema.from_string(schema_text)
    text = f'<prompt schema="s" xml:space="preserve">{prompt_xml(level, rest)}</prompt>'
    for prompt in (Prompt.from_string(text), built_prompt(schema.prompt(), level, rest)):
        result = resolve(schema, prompt, moves=moves)
        assert shorthand(result) == expected
        assert result.imported == chosen_paths(level, "")
    assert orders(schema.children) == list(range(len(orders(schema.children))))
    labels = [node.label for node in texts(nodes, always=True)]
    unselected = [node.label for node in texts(nodes, always=False)]
    assert all(expected.count(label) == 1 for label in labels)
    assert not any(label in expected for label in unselected)


def texts(nodes: list[Node], always: bool) -> Iterator[Node]:
    """The texts that the prompt selects, or those that it does not."""
    for node in nodes:
        if node.kind == "text":
            if always:
                yield node
        elif node.kind == "module" and not node.chosen:
            if not always:
                yield from every_text(node.children)
        else:
            yield from texts(node.children, always)


def every_text(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        if node.kind == "text":
            yield node
        yield from every_text(node.children)


def chosen_paths(level: list[Node], prefix: str) -> set[str]:
    direct = list(chosen_in(level))
    inside = (chosen_paths(node.children, f"{prefix}{node.label}/") for node in direct)
    return {f"{prefix}{node.label}" for node in direct}.union(*inside)


def orders(nodes: tuple[object, ...]) -> list[int]:
    found: list[int] = []
    for node in nodes:
        found.append(node.order)  # type: ignore[attr-defined]
        if isinstance(node, Module | Turn):
            found += orders(node.children)
        elif isinstance(node, Union):
            found += orders(node.members)
    return found


RANDOMS = st.randoms(use_true_random=False)


@settings(max_examples=examples(300), deadline=None)
@given(RANDOMS, st.booleans())
def test_prompts_without_turns_equal_the_oracle(random: Random, moves: bool) -> None:
    maker = Maker(random, moves)
    nodes = maker.level(3, ["text", "module", "union"])
    schema_text = f'<schema name="s" xml:space="preserve">{schema_xml(nodes)}</schema>'
    level, rest = maker.choose(nodes)
    check(nodes, level, rest, oracle(level, rest), moves, schema_text)


@settings(max_examples=examples(300), deadline=None)
@given(RANDOMS, st.booleans())
def test_prompts_with_turns_equal_the_oracle(random: Random, moves: bool) -> None:
    maker = Maker(random, moves)
    turns = []
    for _ in range(random.randint(1, 3)):
        role = random.choice(["system", "user", "assistant"])
        turns.append(Node("turn", role, maker.level(2, ["text", "module", "union"])))
    schema_text = f'<schema name="s" xml:space="preserve">{schema_xml(turns)}</schema>'
    rest = ""
    for number, turn in enumerate(turns):
        turn.children, rest = maker.choose(turn.children)
        if number + 1 < len(turns):
            rest = ""
    for node in list(chosen_in(turns))[1:]:
        node.before = ""  # it would stand after the import of an earlier turn
    expected = with_question(oracle(turns, ""), turns, rest)
    check(turns, turns, rest, expected, moves, schema_text)
