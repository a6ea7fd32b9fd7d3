"""A check of ``checks.py``: forces requests to begin before the last layer of their modules is loaded.

A layer is copied to the device only some time after a pass has attended to the layer before it. A pass that enters the
layer before its copy is submitted is detected. Until the device has copied, slots contain NaN, so that an early read
changes the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

from inlay.engine.forward import StepObserver

_WAIT_S = 20.0
_GRACE_S = 0.1  # time in which a pass that does not wait would go on
_BALLAST, _FILLS = 2**28, 100  # bytes and number of fills: some ten milliseconds in front of a copy


class Forced(StepObserver):
    """Makes copies of layers follow the computation, and counts the passes that begin before the last copy.

    Attributes:
        begun: Number of such passes.
        followed: Each copy came after the pass's previous layer and before its own layer.
    """

    def __init__(self, llm: Any) -> None:
        import torch

        device = llm.storage.device
        self._ballast = torch.empty(_BALLAST, dtype=torch.uint8, device=device) if device.type == "cuda" else None
        self.begun, self.followed = 0, True
        self._storage = llm.storage
        self._entered, self._attended = ([Event() for _ in llm.storage.layers] for _ in range(2))
        backend = llm.local.engine.runner.backend
        self._put, self._attend = llm.storage.put_slab, backend.attend
        llm.storage.put_slab, backend.attend = self._follow, self._noted
        llm.observe(self)

    def computed(self, made: Any, logits: Any, running: Any, seconds: float) -> None:
        self.begun += bool(made.arrivals)

    def _follow(self, layer: int, slots: Any, slab: Any) -> Any:
        if not layer:
            self._poison(slots)
        elif self.followed:
            self.followed = self._attended[layer - 1].wait(_WAIT_S) and not self._entered[layer].wait(_GRACE_S)
        if self._ballast is not None:  # on the copy stream, so that a pass that does not wait comes first
            for _ in range(_FILLS):
                self._ballast.zero_()
        return self._put(layer, slots, slab)

    def _poison(self, slots: Any) -> None:
        """Fill slots with NaN on the copy stream, in front of the copies. In 8 bits, their scales become NaN."""
        for event in (*self._entered, *self._attended):
            event.clear()
        for layer, scales in enumerate(self._storage.scales):
            for memory in scales or (self._storage.keys[layer], self._storage.values[layer]):
                for run in slots:
                    memory[:, run.first : run.end] = float("nan")

    def _noted(self, *args: Any) -> Any:
        """Record a layer's attention. ``args`` are those of a backend's ``attend``."""
        self._entered[args[5]].set()
        output = self._attend(*args)
        self._attended[args[5]].set()
        return output


def check_layers(asked: Any, device: Any) -> Iterator[dict[str, Any]]:
    """Modules in host memory, each read while it is loading: answers equal those with all modules in the pool."""
    from inlay import LLM, Prompt, SamplingParams, Schema

    count, tokens = (4, 48) if asked.dry else (16, 400)
    texts = [f"{n} of them {'word ' * (tokens // 5)}" for n in range(count)]
    schemas = [
        Schema.from_string(f'<schema name="l{n}"><module name="m">{text}</module></schema>')
        for n, text in enumerate(texts)
    ]
    prompts = [Prompt.from_string(f'<prompt schema="l{n}"><m/>And?</prompt>') for n in range(count)]
    params = SamplingParams(temperature=0, max_tokens=2 if asked.dry else 30, ignore_eos=True)
    for kept, kept_bytes in (("auto", 4096),) if asked.dry else (("auto", 4096), ("int8", 4096 * 36 // 128)):
        found = []
        for memory, forced in ((4 * count * tokens * kept_bytes, False), (count * tokens * kept_bytes // 2, True)):
            llm = LLM(
                "random:tiny", device=str(device), attention_backend="triton", dtype="float32", seed=0, store="off",
                kv_memory=memory, kv_cache_dtype=kept, chunk_size=16, host_memory="256MiB", profile="off",
                promotion_memory=0, store_timeout_s=2 * _WAIT_S,
            )  # fmt: skip
            for schema in schemas:
                llm.add_schema(schema)
            encoded, copies = llm.stats().encoded_tokens, Forced(llm) if forced else None
            answers = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
            stats = llm.stats()
            llm.shutdown()
            found.append((answers, stats.encoded_tokens == encoded, stats.host_tokens, dict(stats.host.misses)))
        (expected, _, none, _), (answers, once, read, misses) = found
        passes, unharmed = copies.begun, once and none == 0 < read and not misses
        yield {
            "check": "modules read before their last layer is up", "kept": kept, "host_tokens": read,
            "passes": passes, "misses": misses, "followed": copies.followed,
            "passed": answers == expected and unharmed and copies.followed and passes > 0,
        }  # fmt: skip
