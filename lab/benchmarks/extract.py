"""How fast does the finder find repeated documents in a log of prompts, and does it find all of them?

    python lab/benchmarks/extract.py --prompts 10000 --words 5000

It makes a log with documents at random places and in random order between random text, reads it into memory and finds
repeated text. With ``--model`` it counts tokens too, as ``inlay schema from-prompts`` does. The last line of stdout is
one JSON object:

- ``seconds``: read_s (text to words) + find_s (words to runs) + count_s (modules, tokens and savings).
  count_s is null without a model.
- ``mb_per_s``: the log's text (10^6 bytes) by read_s + find_s.
- ``peak_rss_mib``: peak memory of the process, including the log's own strings.
- ``recall``: the share of the words of planted documents, at all places, that the runs cover.
- ``whole``: the share of the planted documents that one run covers from the first word to the last.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from inlay.authoring.extract import Corpus, ExtractionSettings, LoggedPrompt, LoggedTurn
from inlay.authoring.extract.find import Found, find

_DOCUMENT_WORDS = (100, 800)
_FILL_WORDS = (10, 300)
_VOCABULARY = 30_000


@dataclass(frozen=True)
class Planted:
    """The documents, and for each prompt the documents in it with their character offsets."""

    documents: list[str]
    places: list[list[tuple[int, int]]]


def main() -> None:
    arguments = _arguments()
    settings = ExtractionSettings(min_prompts=arguments.min_prompts, min_tokens=arguments.min_tokens)
    planted = Planted([], [])
    started = time.perf_counter()
    prompts = list(_prompts(arguments, planted))
    print(f"made {len(prompts):,} prompts in {time.perf_counter() - started:.1f} s", file=sys.stderr)

    started = time.perf_counter()
    corpus = Corpus.of(prompts)
    read = time.perf_counter() - started
    del prompts
    started = time.perf_counter()
    found = find(corpus, size=settings.size, least=settings.min_prompts)
    searched = time.perf_counter() - started
    count = _count(corpus, found, settings, arguments.model) if arguments.model else None

    megabytes = sum(map(len, corpus.texts)) / 1e6
    row: dict[str, Any] = {
        "prompts": len(corpus),
        "words": int((corpus.words >= 0).sum()),
        "megabytes": round(megabytes, 1),
        "seconds": round(read + searched + (count or 0), 2),
        "read_s": round(read, 2),
        "find_s": round(searched, 2),
        "count_s": None if count is None else round(count, 2),
        "mb_per_s": round(megabytes / (read + searched), 2),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "runs": len(np.unique(found.runs.ids)),
        **_recall(corpus, found, planted, settings.min_prompts),
    }
    print(json.dumps(row))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000, help="how many")
    parser.add_argument("--words", type=int, default=3_000, help="in a prompt")
    parser.add_argument("--documents", type=int, default=200, help="that repeat")
    parser.add_argument("--share", type=float, default=0.5, help="of a prompt's parts that are documents")
    parser.add_argument("--min-prompts", type=int, default=3)
    parser.add_argument("--min-tokens", type=int, default=32)
    parser.add_argument("--model", help="whose tokenizer counts; none: find only")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _prompts(arguments: argparse.Namespace, planted: Planted) -> Iterator[LoggedPrompt]:
    draw = random.Random(arguments.seed)
    vocabulary = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(_VOCABULARY)]

    def text(bounds: tuple[int, int]) -> str:
        return " ".join(draw.choices(vocabulary, k=draw.randint(*bounds))) + ".\n"

    planted.documents.extend(text(_DOCUMENT_WORDS).capitalize() for _ in range(arguments.documents))
    for number in range(arguments.prompts):
        parts: list[str] = []
        places: list[tuple[int, int]] = []
        words = characters = 0
        left = list(range(arguments.documents))
        while words < arguments.words:
            if left and draw.random() < arguments.share:
                chosen = left.pop(draw.randrange(len(left)))
                part = planted.documents[chosen]
                places.append((chosen, characters))
            else:
                part = text(_FILL_WORDS)
            parts.append(part)
            words += part.count(" ") + 1
            characters += len(part)
        planted.places.append(places)
        yield LoggedPrompt(number + 1, (LoggedTurn(None, "".join(parts)),))


def _count(corpus: Corpus, found: Found, settings: ExtractionSettings, model: str) -> float:
    """Seconds for modules, tokens and savings, without the time to load the tokenizer."""
    from inlay.authoring.extract.extraction import measure
    from inlay.authoring.extract.find import choose
    from inlay.authoring.extract.proposal import propose
    from inlay.cli.from_prompts import encoder_of

    encode = encoder_of(model)
    started = time.perf_counter()
    choice = choose(corpus, found, encode, min_tokens=settings.min_tokens, max_modules=settings.max_modules)
    measure(propose(corpus, found.frame, choice, "log"), encode)
    return time.perf_counter() - started


def _recall(corpus: Corpus, found: Found, planted: Planted, least: int) -> dict[str, float]:
    """The recall of documents that occur in enough prompts."""
    covered = np.zeros(len(corpus.words) + 1, np.int32)
    np.add.at(covered, found.runs.starts, 1)
    np.add.at(covered, found.runs.stops, -1)
    inside = np.cumsum(covered)[:-1] > 0
    holders = np.bincount([one for places in planted.places for one, _ in places], minlength=len(planted.documents))
    hit = total = 0
    whole = set()
    stops = found.runs.stops
    for prompt, places in enumerate(planted.places):
        turn = corpus.places(prompt)
        ends = np.concatenate(([0], np.cumsum(corpus.word_lengths[corpus.words[turn]])))
        for one, character in places:
            if holders[one] >= least:
                start, stop = np.searchsorted(ends, (character, character + len(planted.documents[one]))) + turn.start
                hit, total = hit + int(inside[start:stop].sum()), total + int(stop - start)
                if stop <= stops[np.searchsorted(found.runs.starts, start, side="right") - 1]:
                    whole.add(one)
    often = int((holders >= least).sum())
    return {"recall": round(hit / max(total, 1), 6), "whole": round(len(whole) / max(often, 1), 6)}


if __name__ == "__main__":
    main()
