"""An assistant with traits: six choices, six unions. Two of the 972 personas answer one question.

Every option of every trait is encoded once, for all personas that have it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Literal

from inlay import LLM, SamplingParams, program, system, user


@program
def persona(
    age: Literal["child", "student", "adult"],
    tone: Literal["warm", "dry", "formal"],
    knowledge: Literal["beginner", "amateur", "expert"],
    length: Literal["one-line", "short", "thorough"],
    format: Literal["prose", "list", "table", "steps"],
    goal: Literal["learn", "decide", "fix"],
) -> Iterator[str]:
    """Who asks, and how they want to be answered."""
    with system():
        yield "You are an assistant that adapts to whoever is asking.\n"
        match age:
            case "child":
                yield "The reader is a child of about nine. Use everyday words, short sentences and one good example.\n"
            case "student":
                yield "The reader is a student. Name the concepts, so that they can be looked up later.\n"
            case "adult":
                yield "The reader is an adult with little time. Say what matters first, and why it matters second.\n"
        match tone:
            case "warm":
                yield "Be warm and encouraging; nobody should feel stupid for having asked.\n"
            case "dry":
                yield "Be dry. A little irony is welcome, exclamation marks are not.\n"
            case "formal":
                yield "Be formal and impersonal, as in a letter from an office that wants to be helpful.\n"
        match knowledge:
            case "beginner":
                yield "Suppose no knowledge of the subject, and explain every technical term when it first comes.\n"
            case "amateur":
                yield "Suppose some knowledge of the subject, of the kind that comes from a hobby.\n"
            case "expert":
                yield "Suppose that the reader works in the field. Leave out the basics; state limits and exceptions.\n"
        match length:
            case "one-line":
                yield "Answer in one line.\n"
            case "short":
                yield "Answer in a short paragraph of at most five sentences.\n"
            case "thorough":
                yield "Answer thoroughly, with the reasons, the alternatives and what speaks against each of them.\n"
        match format:
            case "prose":
                yield "Write connected prose, without headings and without lists.\n"
            case "list":
                yield "Write a list of points, the most important one first.\n"
            case "table":
                yield "Write a table with one row for each option and one column for each property.\n"
            case "steps":
                yield "Write numbered steps, each of which can be checked off.\n"
        match goal:
            case "learn":
                yield "The reader wants to understand. End with a question that leads on.\n"
            case "decide":
                yield "The reader has to decide. End with a recommendation, and say how sure of it you are.\n"
            case "fix":
                yield "Something is broken. Begin with what to do now; explain afterwards.\n"
    with user():
        yield "Here is the question.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--reuse", default="anchored")
    parser.add_argument("--question", default="Why does bread rise?")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, reuse=arguments.reuse)
    llm.add_schema(persona.schema)
    asked = {
        "a child": persona("child", "warm", "beginner", "short", "prose", "learn"),
        "a baker": persona("adult", "dry", "expert", "short", "steps", "fix"),
    }
    prompts = [prompt.builder().text(arguments.question).build() for prompt in asked.values()]
    for name, answer in zip(asked, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)), strict=True):
        usage = answer.usage
        print(f"{name}: {usage.cached_tokens} tokens cached, {usage.computed_tokens} computed")
        print(f"  {answer.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
