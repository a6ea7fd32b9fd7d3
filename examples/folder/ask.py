"""Questions on a folder of text files: each file is a module, and each question imports the files that it is about.

The files are chosen by the words that they share with the question. Any retriever can take this place.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from inlay import LLM, Prompt, SamplingParams, Schema
from inlay.errors import Place
from inlay.pml import Module, Text, Turn, numbered

HERE = Path(__file__).parent
QUESTIONS = (
    "Who is the captain of Star of Gamin?",
    "In which year was Monar founded?",
    "How much does Tamor lamp cost?",
    "Who is the host of Lumen Fest?",
    "On which port does Kusol-gate listen?",
)


def schema_of(folder: Path) -> Schema:
    """A module for every .txt file, in the user turn."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise SystemExit(f"{folder} holds no .txt files; name a folder that does")
    modules = tuple(_module(file) for file in files)
    place = Place(str(folder))
    system = Turn("system", (Text("Answer from the documents.\n", place),), place)
    return Schema("folder", numbered((system, Turn("user", modules, place))), source=str(folder))


def _module(file: Path) -> Module:
    place = Place(str(file))
    return Module(file.stem, (Text(file.read_text(encoding="utf-8"), place),), place)


def prompt_for(question: str, schema: Schema, folder: Path, count: int) -> Prompt:
    """The question, behind the files that share most of their words with it, in the order of the schema."""
    words = set(re.findall(r"\w+", question.lower()))
    shared = Counter(
        {
            name: len(words & set(re.findall(r"\w+", (folder / f"{name}.txt").read_text(encoding="utf-8").lower())))
            for name in schema.modules
        }
    )
    best = {name for name, _ in shared.most_common(count)}
    builder = schema.prompt()
    for name in schema.modules:
        if name in best:
            builder = builder.use(name)
    return builder.text(question).build()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--reuse", default="anchored")
    parser.add_argument("--folder", type=Path, default=HERE / "documents")
    parser.add_argument("--files", type=int, default=3, help="how many files a prompt imports")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    arguments = parser.parse_args()
    schema = schema_of(arguments.folder)
    llm = LLM(arguments.model, reuse=arguments.reuse)
    llm.add_schema(schema)
    prompts = [prompt_for(question, schema, arguments.folder, arguments.files) for question in arguments.questions]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    for question, answer in zip(arguments.questions, answers, strict=True):
        usage = answer.usage
        print(f"{question} {answer.outputs[0].text.strip()}")
        print(f"  {usage.cached_tokens} tokens cached, {usage.computed_tokens} computed")


if __name__ == "__main__":
    main()
