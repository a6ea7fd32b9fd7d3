"""The store on disk for models with recurrent layers: a new process continues the state behind a schema's text."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from safetensors import safe_open

from inlay import LLM, ParameterError, Schema
from inlay.kv.offload.disk import DiskTier
from tests.model.equivalence.recorder import Recorder, close
from tests.model.families.configs import tiny
from tests.model.families.suite import _steps as steps_of

SCHEMA = Schema.from_string(
    '<schema name="s">Always here. <module name="a">One module, of a few tokens more than a chunk.</module>'
    '<module name="b">And another one, which is of some more tokens than that.</module></schema>'
)
MODELS = ("qwen3_5_text", "mamba2", "lfm2")


class Process:
    """A process over a folder, which ends with the block."""

    def __init__(self, name: str, folder: Path, **settings: object) -> None:
        self.name, self.salt = name, None
        self.recorder = Recorder(tiny(name), store=folder, **settings)
        self.recorder.llm.add_schema(SCHEMA, encode=False)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.recorder.llm.shutdown()

    def cached(self, text: str) -> int:
        """Ask with both modules, check the logits, and return how many tokens came from the store."""
        prompt = SCHEMA.prompt().use("a").use("b").text(text)
        ((output, logits),) = self.recorder.greedy([prompt], 3, reuse="exact", cache_salt=self.salt)
        close(logits, steps_of(self.name, list(output.prompt_token_ids), output))
        self.disk_tokens = output.usage.disk_tokens
        return int(output.usage.cached_tokens)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("v1/*.safetensors"))


@pytest.mark.parametrize("name", MODELS)
def test_a_new_process_continues_the_state_that_an_earlier_one_has_written(name, tmp_path):
    with Process(name, tmp_path) as first:
        assert first.cached("What then?") == 0
        found = first.cached("And now?")
        assert first.disk_tokens == 0
    assert found > 100
    (file,) = files(tmp_path)
    with safe_open(file, "numpy") as read:
        assert any(key.startswith("state.") for key in read.keys())  # noqa: SIM118  (it is no dictionary)
    with Process(name, tmp_path) as second:
        assert second.cached("Is it far?") == found
        assert second.disk_tokens == found
        stats = second.recorder.llm.stats()
        assert stats.disk_tokens == found
        assert stats.states
        assert (stats.state_hits, stats.state_hit_tokens) == (1, found)
        assert stats.states <= stats.used_state_slots < stats.state_slots
        assert stats.state_bytes % stats.state_slots == 0 < stats.state_bytes


def test_requests_of_any_salt_continue_the_state_behind_a_public_schema(tmp_path):
    with Process("qwen3_5_text", tmp_path) as first:
        first.salt = "one"
        first.cached("What then?")
        found = first.cached("And now?")
    with Process("qwen3_5_text", tmp_path) as second:
        for second.salt in ("two", None):
            assert second.cached(f"Is it far from {second.salt}?") == found > 100
            assert bool(second.disk_tokens) == (second.salt == "two")


@pytest.mark.parametrize("name", MODELS[:2])
def test_a_damaged_state_is_a_miss_and_changes_no_answer(name, tmp_path):
    with Process(name, tmp_path) as first:
        first.cached("What then?")
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    data[-4096] ^= 1  # the first byte of the last page, which is a state's
    file.write_bytes(data)
    with Process(name, tmp_path) as second:
        assert second.cached("Is it far?") == 0
        assert second.recorder.llm.stats().disk_tokens == 0


def test_a_new_process_reads_modules_with_their_states(tmp_path):
    asked = SCHEMA.prompt().use("b").use("a").text("Is it far?")
    with Process("lfm2", tmp_path) as first:
        ((_, logits),) = first.recorder.greedy([asked], 3, reuse="isolated")
    assert len(files(tmp_path)) >= 2
    with Process("lfm2", tmp_path) as second:
        ((output, again),) = second.recorder.greedy([asked], 3, reuse="isolated")
        assert not output.usage.misses
        assert output.usage.disk_tokens == output.usage.cached_tokens > 80
        assert second.recorder.llm.store.modules()
        close(again, logits)


def test_text_of_requests_is_not_written(tmp_path):
    with Process("qwen3_5_text", tmp_path) as process:
        process.recorder.greedy(["A text without a schema, which is long enough to be kept."] * 2, 3)
    assert not files(tmp_path)


def private(name: str, folder: Path, salt: str, *, store_private: bool | None = True) -> Process:
    """A process to which the schema is private to a salt."""
    process = Process(name, folder, store_private=store_private)
    process.recorder.llm.remove_schema("s")
    process.recorder.llm.add_schema(SCHEMA, cache_salt=salt, encode=False)
    process.salt = salt
    return process


@pytest.mark.parametrize("name", MODELS)
def test_a_private_schema_is_not_written_unless_asked(name, tmp_path):
    with private(name, tmp_path, "mine", store_private=None) as process:
        process.cached("What then?")
        assert process.cached("And now?") > 100
    assert not files(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_a_new_process_continues_a_private_state_under_its_salt_alone(name, tmp_path):
    with private(name, tmp_path, "mine") as first:
        first.cached("What then?")
        found = first.cached("And now?")
    assert found > 100
    (file,) = files(tmp_path)
    assert b"mine" not in file.read_bytes()
    with private(name, tmp_path, "yours") as other:
        assert other.cached("Is it far?") == 0
        assert other.disk_tokens == 0
    with Process(name, tmp_path) as public:
        assert public.cached("Is it far?") == 0
    with private(name, tmp_path, "mine") as second:
        assert second.cached("Is it far?") == found
        assert second.disk_tokens == found
        assert second.recorder.llm.stats().state_hit_tokens == found


@pytest.mark.parametrize("salt", [None, "mine"])
def test_a_prefix_goes_with_the_lifetime_of_its_schema(salt, tmp_path, clock):
    """Each request restarts the lifetime, in the pool and on disk."""

    def asked(*waits: float) -> list[int]:
        """Ask once in a new process, and again after each wait."""
        with Process("qwen3_5_text", tmp_path, store_private=True) as process:
            llm, process.salt = process.recorder.llm, salt
            llm.remove_schema("s")
            llm.add_schema(SCHEMA, cache_salt=salt, encode=False, ttl="5m")
            found = [process.cached("What then?")]
            for wait in waits:
                clock.advance(wait)
                found.append(process.cached("And now?"))
            return found

    computed, whole = asked(200)
    assert (computed, len(files(tmp_path))) == (0, 1)
    clock.advance(200)
    assert asked(200) == [whole, whole]
    assert asked(301) == [whole, 0]
    clock.advance(301)
    assert asked() == [0]
    assert files(tmp_path)


@pytest.mark.parametrize("known", ["written", "found", "loaded"])
def test_an_evicted_private_schema_leaves_no_state_and_takes_no_other(known, tmp_path):
    with Process("qwen3_5_text", tmp_path) as public:
        public.cached("What then?")
    with private("qwen3_5_text", tmp_path, "yours") as other:
        other.cached("What then?")
    kept = set(files(tmp_path))
    with private("qwen3_5_text", tmp_path, "mine") as first:
        whole = first.cached("What then?") or first.cached("And now?")
        if known == "written":
            assert first.recorder.llm.evict("s", cache_salt="mine") >= whole > 100
            assert first.cached("Is it far?") == 0
            first.recorder.llm.evict("s", cache_salt="mine")
    assert len(kept) == 2
    if known != "written":
        assert len(files(tmp_path)) == 3
        with private("qwen3_5_text", tmp_path, "mine") as second:
            if known == "loaded":
                assert second.cached("Is it far?") == whole
            second.recorder.llm.evict("s", cache_salt="mine")
            assert second.cached("And back?") == 0
            second.recorder.llm.evict("s", cache_salt="mine")
    assert set(files(tmp_path)) == kept


def test_a_lossy_codec_is_refused(tmp_path):
    with pytest.raises(ParameterError) as refused:
        LLM(tiny("qwen3_5_text"), kv_memory="16MiB", store=tmp_path, store_codec="int8")
    assert refused.value.code == "model.no_reuse"


@pytest.mark.parametrize("known", ["written", "found", "loaded"])
def test_an_evicted_schema_leaves_no_state_in_the_pool_or_on_disk(known, tmp_path):
    with Process("qwen3_5_text", tmp_path) as first:
        whole = first.cached("What then?") or first.cached("And now?")
        if known == "written":
            assert first.recorder.llm.evict("s") >= whole > 100
            assert first.cached("Is it far?") == 0
            first.recorder.llm.evict("s")
    if known != "written":
        assert files(tmp_path)
        with Process("qwen3_5_text", tmp_path) as second:
            if known == "loaded":
                assert second.cached("Is it far?") == whole
            second.recorder.llm.evict("s")
            assert second.cached("And back?") == 0
            second.recorder.llm.evict("s")
    assert files(tmp_path) == []


@pytest.mark.parametrize("name", MODELS)
def test_an_evicted_schema_is_not_written_afterwards(name, tmp_path, monkeypatch):
    put = DiskTier.put

    def slow_put(*given):
        time.sleep(0.2)
        put(*given)

    monkeypatch.setattr(DiskTier, "put", slow_put)  # eviction comes while segments are being written
    with Process(name, tmp_path) as process:
        process.cached("What then?")
        process.cached("And now?")
        process.recorder.llm.evict("s")
    assert files(tmp_path) == []


def test_an_eviction_lists_no_files_of_other_schemas(tmp_path, monkeypatch):
    """Its cost would grow with all that is on disk, on the engine's thread."""
    other = Schema.from_string(
        '<schema name="t">Some text. <module name="c">The module of another schema.</module></schema>'
    )
    with Process("lfm2", tmp_path) as process:
        llm = process.recorder.llm
        llm.add_schema(other, reuse="isolated")
        llm.add_schema(SCHEMA, reuse="isolated")
        process.cached("What then?")
        process.cached("And now?")
        listed: list[bytes] = []
        monkeypatch.setattr(DiskTier, "iterate", lambda tier: pytest.fail("it lists all files"))
        found = DiskTier.labelled
        monkeypatch.setattr(
            DiskTier,
            "labelled",
            lambda tier, labels: [listed.append(entry.key) or entry for entry in found(tier, labels)],
        )
        llm.evict("s", reuse="isolated")
        assert all(tokens == stored > 0 for tokens, stored in llm.stored("t", reuse="isolated").values())
    monkeypatch.undo()
    left = {bytes.fromhex(file.stem) for file in files(tmp_path)}
    assert len(left) == 2
    assert listed
    assert left.isdisjoint(listed)
