"""Requests of a simulated cluster: a trace from a file, or random ones over modules by Zipf's law."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inlay.cluster.pieces import Wanted, WantedPiece
from inlay.errors import ParameterError
from inlay_lab.options import check_least

_MOST_LINES = 5_000_000
_MS = 1e-3


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request.

    Attributes:
        at: Seconds from the start.
        wanted: The pieces and tokens of its prompt.
        answer: Tokens of its answer.
    """

    at: float
    wanted: Wanted
    answer: int


@dataclass(frozen=True, kw_only=True)
class ZipfTraffic:
    """Prompts of several modules in random order, and new text. Raises ParameterError.

    Attributes:
        modules: Number of modules.
        exponent: Of Zipf's law, which sets the modules' popularity.
        each: Modules in a prompt.
        module_tokens, new_tokens, answer_tokens: Means; module and answer lengths vary by a factor of two.
    """

    modules: int = 10_000
    exponent: float = 1.0
    each: int = 4
    module_tokens: int = 1_000
    new_tokens: int = 64
    answer_tokens: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 4:
            raise ParameterError(f"--zipf is {self.exponent}; give exponents from 0 (all alike) to 4")
        check_least(1, modules=self.modules, module_tokens=self.module_tokens)
        check_least(1, new_tokens=self.new_tokens, answer_tokens=self.answer_tokens)
        if not 0 <= self.each <= self.modules:
            raise ParameterError(f"each prompt takes {self.each} of {self.modules} modules; take 0 to all of them")

    def requests(self, count: int, seed: int) -> list[SimulatedRequest]:
        """``count`` requests, a second apart; see ``arrivals``."""
        draws = np.random.default_rng([seed, 1])
        weights = 1 / np.arange(1, self.modules + 1) ** self.exponent
        sums = np.cumsum(weights / weights.sum())
        sizes = np.maximum(1, draws.uniform(2 / 3, 4 / 3, self.modules) * self.module_tokens).astype(int)
        keys = [_key(f"module {number}") for number in range(self.modules)]
        made = []
        for number in range(count):
            chosen: dict[int, None] = {}
            while len(chosen) < self.each:
                more = np.searchsorted(sums, draws.random(2 * self.each), side="right")
                chosen.update(dict.fromkeys(min(int(one), self.modules - 1) for one in more))
            order = list(chosen)[: self.each]
            pieces = tuple(WantedPiece((keys[one],), int(sizes[one])) for one in order)
            tokens = sum(piece.tokens for piece in pieces) + self.new_tokens
            answer = max(1, int(draws.uniform(2 / 3, 4 / 3) * self.answer_tokens))
            made.append(SimulatedRequest(float(number), Wanted(pieces, tokens), answer))
        return made


def arrivals(requests: list[SimulatedRequest], rate: float, seed: int) -> list[SimulatedRequest]:
    """The same requests as a Poisson process of ``rate`` requests a second."""
    gaps = np.random.default_rng([seed, 2]).exponential(1 / rate, len(requests))
    return [
        SimulatedRequest(float(at), request.wanted, request.answer)
        for at, request in zip(np.cumsum(gaps), requests, strict=True)
    ]


def read_trace(path: Path, *, block_tokens: int = 512) -> list[SimulatedRequest]:
    """A trace of JSON lines, in the order of time. Raises ParameterError with the line.

    Our format: ``{"at": seconds, "modules": [["name", tokens], …], "new": tokens, "answer": tokens}``. The format of
    Mooncake and vLLM: ``{"timestamp": milliseconds, "input_length": …, "output_length": …, "hash_ids": […]}``. Each of
    its
    ids is a block of ``block_tokens`` tokens that is found only behind the blocks before it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            made = list(_requests(path, itertools.islice(file, _MOST_LINES + 1), block_tokens))
    except OSError as error:
        raise ParameterError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise ParameterError(f"{path}: it is not UTF-8; a trace is lines of JSON") from None
    if not made:
        raise ParameterError(f"{path}: the trace has no requests; it is one JSON object a line")
    made.sort(key=lambda request: request.at)
    first = made[0].at
    return [SimulatedRequest(request.at - first, request.wanted, request.answer) for request in made]


def _requests(path: Path, lines: Iterator[str], block_tokens: int) -> Iterator[SimulatedRequest]:
    for number, line in enumerate(lines, 1):
        if number > _MOST_LINES:
            raise ParameterError(f"{path}: more than {_MOST_LINES:,} lines; cut the trace")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield _of_mooncake(row, block_tokens) if "hash_ids" in row else _of_ours(row)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            said = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ParameterError(
                f"{path}:{number}: this is no request ({said}); write "
                '{"at": 0.5, "modules": [["name", 800]], "new": 40, "answer": 60}, or timestamp, input_length, '
                "output_length and hash_ids"
            ) from None


def _of_ours(row: Mapping[str, Any]) -> SimulatedRequest:
    pieces = tuple(WantedPiece((_key(str(name)),), _count(tokens, "tokens", 1)) for name, tokens in row["modules"])
    new = _count(row["new"], "new", 1)
    wanted = Wanted(pieces, sum(piece.tokens for piece in pieces) + new)
    return SimulatedRequest(_seconds(row["at"], "at"), wanted, _count(row["answer"], "answer", 1))


def _of_mooncake(row: Mapping[str, Any], block_tokens: int) -> SimulatedRequest:
    tokens = _count(row["input_length"], "input_length", 1)
    sizes = [min(block_tokens, tokens - 1 - at) for at in range(0, tokens - 1, block_tokens)]
    pieces = tuple(
        WantedPiece((_key(f"block {one}"),), size, chained=number > 0)
        for number, (one, size) in enumerate(zip(row["hash_ids"], sizes, strict=False))
    )
    answer = max(1, _count(row["output_length"], "output_length", 0))
    return SimulatedRequest(_seconds(row["timestamp"], "timestamp") * _MS, Wanted(pieces, tokens), answer)


def _count(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name} is {value!r:.40}, and must be a whole number of at least {least}")
    return value


def _seconds(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r:.40}, and must be a time of at least 0")
    return float(value)


def _key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "little")
