"""Token selection: a pass that measures the tokens of a prompt's modules, to choose those to recompute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from inlay.attention.mass import AttentionMass
from inlay.engine.allocation import SequenceAllocation
from inlay.engine.runner import Runner
from inlay.kv.identity import TokenRun
from inlay.kv.store import SegmentStore
from inlay.prompt.composed import CachedSpan, ComposedPrompt, NewSpan
from inlay.prompt.recompute import Scores, inexact_modules
from inlay.recompute import Recompute
from inlay.slots import SlotRange, cut


def place_of(run: TokenRun) -> tuple[bytes, int]:
    """The identity of a run's start, wherever the run ends."""
    return run.digest, run.start


class Selection:
    """One selecting pass.

    Args:
        composed: its composed prompt.
        allocation: its own, with no work taken yet.
    """

    def __init__(self, recompute: Recompute, composed: ComposedPrompt, allocation: SequenceAllocation) -> None:
        self._composed = composed
        self._tail = allocation.tail
        self._mass: AttentionMass | None = None
        own = [prefill for prefill in allocation.prefill if not prefill.module]
        self._computed = [(prefill.keep, prefill.tokens_left) for prefill in own]
        if recompute.by_attention:
            last = composed[-1]
            assert isinstance(last, NewSpan), "the new text comes last"
            self._mass = AttentionMass(last.start + len(last.ids))
            own = own[-1:]
        for prefill in own:
            assert prefill.left is not None, "nothing is taken yet"
            prefill.left = replace(prefill.left, mass=self._mass, check=recompute.by_keys)

    def cost(self, chosen: ComposedPrompt, runner: Runner) -> int:
        """The cost in tokens through all layers; see Usage.selecting_tokens.

        Args:
            chosen: the final composed prompt. Work of this pass that it reuses is not counted.
        """
        kept = {place_of(part.run) for part in chosen if not isinstance(part, CachedSpan) and part.run is not None}
        tokens = sum(tokens for run, tokens in self._computed if run is None or place_of(run) not in kept)
        return tokens if self._mass is not None else runner.check_cost(tokens)

    def scores(self, store: SegmentStore, runner: Runner) -> Scores:
        """The measured scores, once the whole pass is computed."""
        if self._mass is not None:
            at = self._mass.by_position
            return {part.start: at[part.start : part.start + part.length] for part in inexact_modules(self._composed)}
        compared: list[tuple[int, npt.NDArray[np.int64]]] = []  # per module: its start, and one column per token
        taken = 0
        for before, part in zip((None, *self._composed), self._composed, strict=False):
            if not isinstance(part, NewSpan):
                continue
            if isinstance(before, CachedSpan) and before.start == part.start:
                stored = store.get(before.spec)
                if stored is not None:  # otherwise another copy was read, which is gone now
                    here = _numbers(cut(self._tail, taken, len(part.ids)))
                    there = _numbers(cut(stored.slots, before.first, before.length))
                    shift = np.full_like(here, before.start - before.first - before.spec.start)
                    compared.append((part.start, np.stack((here, there, shift))))
            taken += len(part.ids)
        if not compared:
            return {}
        columns = [each for _, each in compared]
        moved = runner.key_deviation(*np.hstack(columns))
        of_modules = np.split(moved, np.cumsum([each.shape[1] for each in columns])[:-1])
        return {start: own for (start, _), own in zip(compared, of_modules, strict=True)}


def _numbers(ranges: tuple[SlotRange, ...]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(each.first, each.end) for each in ranges])
