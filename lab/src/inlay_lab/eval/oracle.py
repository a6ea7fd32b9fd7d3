"""Token selection by the true deviation of each token in the very prompt, as a reference for real policies.

It needs the full prefill that reuse avoids, so no policy for serving uses it. ``anchored+oracle:0.1`` recomputes a
tenth of the module tokens, as ``profiled:0.1`` would with true profiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from inlay.attention.plan import Part
from inlay.client.llm import LLM
from inlay.engine.allocation import Work
from inlay.engine.background.profiler import KnownProfiles, Profile, deviation
from inlay.engine.core import EngineCore
from inlay.errors import CapacityError
from inlay.pml.schema import Prompt
from inlay.prompt.composed import compose, expected_deviations, inexact_modules
from inlay.prompt.request import EngineRequest
from inlay.sampling.params import SamplingParams
from inlay.slots import cut

_WRITTEN, _SERVED = "+oracle:", "+profiled:"
_CHUNK = 512  # tokens of a pass
_ALIKE = np.ones(1, np.float16)  # the profile of a module with equal deviation of all tokens


def is_oracle(reuse: str) -> bool:
    """True if a policy names the oracle's token selection."""
    return _WRITTEN in reuse


def served(reuse: str) -> str:
    """The policy to request from the engine: ``profiled`` instead of ``oracle``."""
    return reuse.replace(_WRITTEN, _SERVED)


@contextmanager
def true_profiles(llm: LLM, prompt: Prompt, reuse: str, positions: str) -> Iterator[None]:
    """Use true deviation profiles for a prompt's modules within a block.

    The modules must be stored. Raises CapacityError if the pool has no room for the prompt beside them.
    """
    engine = llm.local.engine
    asked = llm.processor.process(prompt, SamplingParams(max_tokens=1), llm.policy(served(reuse), positions))
    before, engine.kv_manager.profiles = engine.kv_manager.profiles, _profiles(engine, asked)
    try:
        yield
    finally:
        engine.kv_manager.profiles = before


def _profiles(engine: EngineCore, request: EngineRequest) -> KnownProfiles:
    """Profiles that select the tokens with the largest deviation in this prompt."""
    known, composed = KnownProfiles(), compose(request)
    keys = {part.start: part.spec.lossless.key for part in inexact_modules(composed)}
    alike = expected_deviations(composed, dict.fromkeys(keys.values(), _ALIKE))
    for start, moved in true_moves(engine, request).items():
        known.add(keys[start], (moved / alike[start]).astype(np.float16))
    return known


def true_moves(engine: EngineCore, request: EngineRequest) -> dict[int, Profile]:
    """The deviation of each module token from full prefill, by the start of its module.

    The modules must be stored. Raises CapacityError if the pool has no room for the prompt beside them.
    """
    pool = engine.store.pool
    slots = pool.allocate(len(request.ids))
    if slots is None:
        raise CapacityError("the oracle computes whole prompts, and the pool has no room for one; give more kv_memory")
    moves = {}
    try:
        left: Work | None = Work(request.ids, Part.at(np.array(request.positions), (), slots))
        while left is not None:
            work, left = left.split(_CHUNK) if left.part.rows > _CHUNK else (left, None)
            engine.runner.run([work], [])
        numbers = {position: at for at, position in enumerate(request.positions)}
        for part in inexact_modules(compose(request)):
            found = engine.store.get(part.spec)
            assert found is not None, "modules are stored before the oracle is asked"
            here = cut(slots, numbers[part.start], part.length)
            there = cut(found.slots, part.first, part.length)
            moves[part.start] = deviation(engine.runner.storage, there, here)
    finally:
        pool.free(slots)
    return moves
