"""Time to the first token of a prompt that reads one module: encoded, read from the store, or already in the pool.

The same turns time other readings: a plain read of the file, or of one as large as a server's entry;
``safetensors.torch.load_file`` with a copy into memory shaped like a pool; and llama.cpp's saved slots. *Cold* means
that the file is dropped from the page cache before each reading.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from inlay.client.llm import LLM
from inlay.client.local import InProcessClient
from inlay.kv.offload.disk import DiskTier
from inlay.models.spec import dtype_name
from inlay.pml import Prompt, Schema
from inlay.sampling.params import SamplingParams
from inlay.settings import check_choice
from inlay.types import RequestOutput
from inlay_lab.bench.engines.gguf_file import why_not
from inlay_lab.bench.engines.peer import Peer, llama_cpp
from inlay_lab.bench.machine import Meter, clocked, describe_machine, in_turns
from inlay_lab.bench.store.files import LikePool, drop_pages, read_through
from inlay_lab.options import check_least

BASELINES = ("disk", "safetensors", "llama.cpp")

_GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_PROMPT = Prompt.from_string('<prompt schema="s"><m/>?</prompt>')
_SLOTS = 2  # slots of memory shaped like a pool, times the tokens


@dataclass(frozen=True, kw_only=True)
class StoreSetting:
    """Options of the store benchmark. Raises ParameterError.

    Attributes:
        tokens: Of the module.
        codec: Of the store.
        address: Of a server to use as the store instead of a folder.
        folder: On the disk to measure.
        runs: Readings of each row; encoding takes longer and runs less often.
    """

    model: str
    folder: Path
    tokens: int = 2048
    codec: str = "none"
    address: str | None = None
    runs: int = 9
    baselines: tuple[str, ...] = BASELINES

    def __post_init__(self) -> None:
        check_least(1, tokens=self.tokens, runs=self.runs)
        for word in self.baselines:
            check_choice("baseline", word, BASELINES)


@dataclass
class Reading:
    """A meter of a file's reading that also records the seconds of reading alone.

    Attributes:
        ask: Returns the seconds to the first token and of reading. Without a model, both are equal.
        size: In bytes.
        before: Called first each time, untimed.
    """

    ask: Callable[[], tuple[float, float]]
    size: int
    before: Callable[[], object]
    has_model: bool = True
    seconds: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        self.before()
        whole, reading = self.ask()
        self.seconds.append(reading)
        return whole

    @property
    def ms(self) -> float:
        """The median. The first reading warms up and does not count, as in in_turns."""
        return statistics.median(self.seconds[1:] or self.seconds) * 1000


@dataclass
class Meters:
    """The meters by the name of their row, and the reason for each missing row."""

    timed: dict[str, Meter] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add_file(
        self, name: str, ask: Callable[[], tuple[float, float]], file: Path, *, has_model: bool = True
    ) -> None:
        """Add readings of a file from the page cache and, if the cache can drop it, cold."""
        size = file.stat().st_size
        if drop_pages(file):
            self.timed[f"{name}, cold"] = Reading(ask, size, partial(_make_cold, file), has_model)
        else:
            self.left_out[f"{name}, cold"] = f"the page cache keeps {file}; name a folder on a disk"
        self.timed[name] = Reading(ask, size, partial(read_through, file), has_model)

    def add_bare(self, name: str, read: Callable[[], object], file: Path) -> None:
        """Add readings of a file without a model."""
        meter = clocked(read)
        self.add_file(name, lambda: ((seconds := meter()), seconds), file, has_model=False)

    def rows(self, runs: int) -> list[dict[str, Any]]:
        """Time all meters in turns. Returns rows with medians in ms; ``mb_s`` is 10^6 bytes a second."""
        rows = []
        for name, timing in in_turns(self.timed, runs).items():
            row: dict[str, Any] = {"name": name, "first_token_ms": round(timing.ms, 2)}
            meter = self.timed[name]
            if isinstance(meter, Reading):
                row |= {"reading_ms": round(meter.ms, 3), "bytes": meter.size}
                row["mb_s"] = round(meter.size / meter.ms / 1e3, 1)
                if not meter.has_model:
                    del row["first_token_ms"]
            rows.append(row)
        return rows


def _make_cold(file: Path) -> None:
    assert drop_pages(file), "the page cache forgets it, as it did before"


class Stored:
    """An engine with a store that contains one module of the wanted length."""

    def __init__(self, setting: StoreSetting) -> None:
        place = {"store_shared": setting.address} if setting.address else {"store": setting.folder / "store"}
        self.llm = llm = LLM(
            setting.model,
            **place,
            store_codec=setting.codec,
            reuse="anchored",  # the module is the only file
            kv_memory="2GiB",
            seed=0,
            max_num_batched_tokens=8192,
            max_pass_s=None,
            device="cpu",
        )
        ids = llm.encoder.text("One of a row of words that all are alike. " * setting.tokens)[: setting.tokens]
        text = llm.tokenizer.decode(list(ids))
        llm.add_schema(Schema.from_string(f'<schema name="s"><module name="m">{text}</module></schema>'), encode=False)
        llm.generate("Some other text, so that nothing is done for the first time. " * 20, _GREEDY)
        assert isinstance(llm.client, InProcessClient)
        (self.tier,) = llm.client.residency.tiers
        self.new = 0  # tokens computed behind the module

    def encoded(self) -> float:
        """Seconds to the first token with an empty store. The encoded module is then written."""
        self.llm.store.clear()
        for entry in self.tier.iterate():
            self.tier.delete(entry.key)
        output = self._ask()
        assert output.usage.cached_tokens == 0, "nothing was there"
        while self.llm.stats().unwritten_segments:
            time.sleep(0.01)
        return _first_token(output)

    def read(self) -> tuple[float, float]:
        """Seconds to the first token with the module only in the store, and of reading it."""
        self.llm.store.clear()
        output = self._ask()
        usage = output.usage
        assert usage.disk_tokens + usage.shared_tokens == usage.cached_tokens > usage.computed_tokens, "it was read"
        assert output.metrics.fetch_s is not None
        self.new = usage.computed_tokens
        return _first_token(output), output.metrics.fetch_s

    def in_pool(self) -> float:
        output = self._ask()
        usage = output.usage
        assert usage.disk_tokens + usage.shared_tokens == 0 < usage.cached_tokens, "it was in the pool"
        return _first_token(output)

    @property
    def file(self) -> Path:
        """The module's file in the folder."""
        assert isinstance(self.tier, DiskTier)
        return max(self.tier.folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)

    def _ask(self) -> RequestOutput:
        (output,) = self.llm.generate(_PROMPT, _GREEDY)
        return output


def _first_token(output: RequestOutput) -> float:
    assert output.metrics.ttft_s is not None
    return output.metrics.ttft_s


class LlamaSlot:
    """The file of a slot, as llama.cpp's server saves it: the first ``tokens`` tokens of a prompt."""

    def __init__(self, peer: Peer, file: Path, prompt: Sequence[int], tokens: int) -> None:
        self._peer, self.file, self._prompt, self._tokens = peer, file, prompt, tokens
        peer.answer([prompt[:tokens]], 1)
        peer.call("save", file=str(file))

    def loaded(self) -> tuple[float, float]:
        """Seconds to the first token with the slot only in the file, and of reading it."""
        self._peer.call("forget")
        reading, _ = self._peer.call("load", file=str(self.file), tokens=self._tokens)
        return reading + self._peer.answer([self._prompt], 1), reading


def measure_store(setting: StoreSetting) -> dict[str, Any]:
    """Measure every row; returns ``{"rows": […], "left_out": {name: why}, …}``. Raises InlayError."""
    stored, meters = Stored(setting), Meters()
    stored.encoded()
    stored.read()
    config, dtype = stored.llm.loaded.model.config, dtype_name(stored.llm.loaded.model.dtype)
    meters.timed["encoded"] = stored.encoded
    size = stored.tier.stats().bytes
    with ExitStack() as stack:
        if setting.address:
            meters.timed["store"] = Reading(stored.read, size, lambda: None)
        else:
            meters.add_file("store", stored.read, stored.file)
        meters.timed["in the pool"] = stored.in_pool
        if "disk" in setting.baselines:
            if setting.address:
                plain = setting.folder / "plain"
                plain.write_bytes(os.urandom(size))
            else:  # the store's file itself: its place on the disk affects the cost of reading
                plain = stored.file
            meters.add_bare("disk", partial(read_through, plain), plain)
        if "safetensors" in setting.baselines and setting.address:
            meters.left_out["safetensors"] = "it reads files, and the store is a server"
        elif "safetensors" in setting.baselines:
            pool = LikePool(stored.file, _SLOTS * setting.tokens)
            meters.add_bare("load_file and copy", partial(pool.load, stored.file), stored.file)
        if "llama.cpp" in setting.baselines:
            if (why := why_not(config, dtype)) is not None:
                meters.left_out["llama.cpp"] = why
            else:
                prompt = [token % config.vocab_size for token in range(setting.tokens + stored.new)]
                remedy = "leave it out with --baselines disk,safetensors"
                peer = stack.enter_context(llama_cpp(config, len(prompt) + 1, remedy))
                slot = LlamaSlot(peer, setting.folder / "slot", prompt, setting.tokens)
                meters.timed["llama.cpp, computed"] = partial(peer.first_token, prompt)
                meters.add_file("llama.cpp, slot", slot.loaded, slot.file)
                meters.timed["llama.cpp, held"] = partial(peer.first_token, prompt, setting.tokens)
        rows = meters.rows(setting.runs)
    stored.llm.shutdown()
    return {
        "model": setting.model,
        "dtype": dtype,
        "tokens": setting.tokens,
        "new": stored.new,
        "codec": setting.codec,
        "bytes": size,
        "rows": rows,
        "left_out": meters.left_out,
        "machine": describe_machine(),
    }
