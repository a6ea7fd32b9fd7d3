"""Few-shot classification: the examples are modules, and every text is classified by the probability of each label."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Literal

from inlay import LLM, program, system, user

LABELS = ("praise", "complaint", "question")
EXAMPLES = {
    "praise": (
        "The lamp arrived a day early and is even nicer than in the picture. Thank you!",
        "I have called three shops today, and yours was the only one where somebody knew the answer.",
        "Five years of daily use, and the kettle still looks new.",
    ),
    "complaint": (
        "The chair came with three legs. I would have preferred four.",
        "This is the second time that my parcel was left in the rain.",
        "Your hotline put me through to six people, and none of them could help.",
    ),
    "question": (
        "Does the radio also run on batteries?",
        "Until when do I have to order to get it before the holidays?",
        "Can I send back a drill that I have used once?",
    ),
}
TEXTS = (
    "The drill broke after two holes.",
    "Is the green lamp available again?",
    "Best bread knife I ever had.",
)


@program
def classify(examples: frozenset[Literal["praise", "complaint", "question"]]) -> Iterator[str]:
    """A task, and examples for the labels that need them."""
    with system():
        yield "Say what the message of a customer is: praise, complaint or question. Answer with that word.\n"
        for label in LABELS:
            if label in examples:
                for text in EXAMPLES[label]:
                    yield f"Message: {text}\nAnswer: {label}\n"
    with user():
        yield "Message: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--reuse", default="anchored")
    parser.add_argument("--without", choices=LABELS, action="append", default=[], help="a label that gets no examples")
    parser.add_argument("texts", nargs="*", default=TEXTS)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, reuse=arguments.reuse)
    llm.add_schema(classify.schema)
    base = classify(frozenset(LABELS) - frozenset(arguments.without)).builder()
    answers = [llm.tokenizer.encode(label, add_special_tokens=False) for label in LABELS]
    for text in arguments.texts:
        found = llm.distributions([base.text(text).build()] * len(LABELS), answers)
        scores = [
            float(tokens.gather(-1, tokens.new_tensor(ids).long()[:, None]).sum())
            for tokens, ids in zip(found, answers, strict=True)
        ]
        print(f"{LABELS[scores.index(max(scores))]:10} {text}")


if __name__ == "__main__":
    main()
