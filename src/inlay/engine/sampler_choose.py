"""One draw a row, for many rows at once.

A draw depends on its own row's logits, parameters, seed and step, never on the rows beside it: the random number comes
from a counter-based generator on (seed, step), and the token is found by inverse CDF over integer weights.

Rows take one of three paths:
- *free*: temperature and min-p alone. Tokens stand in the order of their ids.
- *ranked*: top-k or top-p. They stand by falling score, ties by id.
- *typical*: typical-p without these. They stand by how typical they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from inlay.engine.sampler_filters import Kept, Settings, block_sums, block_weights, ranked, typical
from inlay.engine.sampler_lists import BLOCK, Blocks, Floats
from inlay.engine.sampler_row import SETTINGS, Ids, Row

_Draws = npt.NDArray[np.object_]  # Python's integers: 64 random bits each


def choose(blocks: Blocks, best: Floats, rows: Sequence[Row], vocabulary: int) -> Ids:
    """Draw one token for every row.

    blocks: adjusted logits, (rows, width). best: every row's greatest one, finite, (rows,).
    Returns token ids, (rows,).
    """
    settings = np.array([row.settings for row in rows], dtype=SETTINGS)
    settings["top_k"][settings["top_k"] >= vocabulary] = 0
    draws = np.array([draw(row.seed, row.step) for row in rows], dtype=object)
    tokens = np.empty(len(rows), dtype=np.int64)
    free, by_rank, by_type = paths(settings)
    totals = np.zeros(len(rows), dtype=np.int64)
    if len(free):
        tokens[free] = _draw_by_id(blocks.take(free), best[free], settings[free], draws[free])
    if len(by_rank):
        summed = by_rank[settings["top_k"][by_rank] == 0]
        totals[summed] = block_sums(blocks.take(summed), best[summed], settings[summed]).sum(axis=1)
        lists = ranked(blocks.take(by_rank), best[by_rank], settings[by_rank], totals[by_rank])
        _draw_listed(tokens, by_rank, lists, draws)
    if len(by_type):
        _draw_listed(tokens, by_type, typical(blocks.take(by_type), best[by_type], settings[by_type]), draws)
    return tokens


def draw(seed: int, step: int) -> int:
    """64 random bits: the step-th block of Philox 4x64 under the seed (Salmon et al., SC 2011)."""
    return int(np.random.Philox(key=seed, counter=step).random_raw())


def paths(settings: Settings) -> tuple[Ids, Ids, Ids]:
    """The rows that are free, ranked and typical."""
    by_rank = (settings["top_k"] > 0) | (settings["top_p"] < 1)
    by_type = ~by_rank & (settings["typical_p"] < 1)
    return np.flatnonzero(~by_rank & ~by_type), np.flatnonzero(by_rank), np.flatnonzero(by_type)


def _draw_by_id(blocks: Blocks, best: Floats, settings: Settings, draws: _Draws) -> Ids:
    """Find the block that the draw falls into, then the token."""
    sums = block_sums(blocks, best, settings)
    ends = sums.cumsum(axis=1)
    targets = _targets(draws, ends[:, -1])
    rows = np.arange(len(draws))
    numbers = (ends <= targets[:, None]).sum(axis=1)
    inside = block_weights(blocks, best, settings, numbers)
    rest = targets - (ends[rows, numbers] - sums[rows, numbers])
    return np.asarray(numbers * BLOCK + (inside.cumsum(axis=1) <= rest[:, None]).sum(axis=1))


def _draw_listed(tokens: Ids, rows: Ids, lists: Iterable[Kept], draws: _Draws) -> None:
    for places, ids, weights in lists:
        ends = weights.cumsum(axis=1)
        targets = _targets(draws[rows[places]], ends[:, -1])
        numbers = (ends <= targets[:, None]).sum(axis=1)
        tokens[rows[places]] = ids[np.arange(len(places)), numbers]


def _targets(draws: _Draws, totals: Ids) -> Ids:
    """Numbers from 0 to total - 1, from 64 random bits each; the products take 126 bits."""
    return np.asarray((draws * totals.astype(object)) >> 64, dtype=np.int64)
