"""Tiny models of every supported family, with weights large enough for attention to matter."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from inlay.kv.offload import loader, shared
from tests.clock import Clock

if TYPE_CHECKING:  # the libraries take seconds to load, and the unit tests need none of them
    from inlay.models.load import LoadedModel

# Fingerprints that loads leave behind are the user's, not the tests'; processes that tests start heed it too.
_CACHE = tempfile.TemporaryDirectory(prefix="inlay-tests-")
os.environ["INLAY_CACHE_ROOT"] = _CACHE.name
os.environ["INLAY_STORE"] = "off"  # a test that wants a store says so

# A script starts its background jobs with Ctrl-C ignored, and so would be the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Targets that try the same examples every time learn nothing from many; see tests/generated.py.
settings.register_profile("ci", settings.get_profile("ci"), max_examples=25)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``sampled(n)``, mark all but every n-th case as long."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.long)
            seen[test] += 1


def pytest_collection_finish() -> None:
    """Tiny models gain nothing from several threads, and threads that wait for each other stall."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no store that stalls: a test of deadlines sets its own."""
    for name in ("FIND_S", "BLOCK_S", "WRITE_S"):
        monkeypatch.setattr(shared, name, 30.0)
    monkeypatch.setattr(shared, "CONNECT_S", 5.0)
    monkeypatch.setattr(loader, "SEEK_S", 30.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of this process, which the test may set forward."""
    return Clock(monkeypatch)


_COMMON: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}

#: name → (model type, settings)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "llama3-scaled": (
        "llama",
        _COMMON
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": (
        "llama",
        _COMMON
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "mistral": ("mistral", _COMMON | {"sliding_window": 40, "head_dim": 8}),
    "qwen2": ("qwen2", _COMMON),
    "qwen2-mixed": (
        "qwen2",
        _COMMON
        | {
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3": ("qwen3", _COMMON | {"head_dim": 16}),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": 262,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 2048,
            "initializer_range": 0.25,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        _COMMON
        | {
            "initializer_range": 0.15,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 40,
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 262,
        },
    ),
}
FAMILIES = tuple(dict.fromkeys(model_type for model_type, _ in CONFIGS.values()))
ROTARY = tuple(name for name in CONFIGS if name != "gpt2")


@cache
def tiny(name: str) -> LoadedModel:
    """A tiny model in fp32 with one token a byte; the same object at every call."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from inlay.models.families import describe
    from inlay.models.load import LoadedModel
    from inlay.models.shapes import bytes_tokenizer
    from inlay.models.weights import STOCK, prepare

    kind, settings = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=torch.float32).eval()
    return LoadedModel(f"tiny-{name}", model, bytes_tokenizer(), describe(model), prepare(model, STOCK))


@pytest.fixture(params=list(CONFIGS))
def any_model(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny(request.param)


@pytest.fixture(params=ROTARY)
def rotary_model(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny(request.param)
