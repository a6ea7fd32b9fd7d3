"""The options of commands that answer in this process: how a model is loaded, what it reuses, and how it samples."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from inlay.cli.loading import told_loading
from inlay.cli.options import (
    AcrossAdapters,
    Adapter,
    ChatTemplate,
    Compile,
    Device,
    DType,
    Eviction,
    HostMemory,
    KVCacheDType,
    MaxModelLen,
    Promote,
    Quantization,
    Recompute,
    Reuse,
    ReuseTolerance,
    Speculation,
    StateMemory,
    Store,
    StoreBytes,
    StoreCodec,
    StoreShared,
    Threads,
    Weights,
    adapters_of,
    policy_of,
    read_template,
    store_of,
    told_device,
    told_store,
)
from inlay.errors import ParameterError
from inlay.kv.policies import DEFAULT_EVICTION
from inlay.policy import ReusePolicy
from inlay.tolerance import DEFAULT
from inlay.wording import clip

if TYPE_CHECKING:
    from inlay.client.async_llm import AsyncLLM
    from inlay.client.llm import LLM
    from inlay.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The values of these options. A command takes them with ``with_model_options``."""

    threads: Threads = None  # its callback sets the number, and no value arrives here
    dtype: DType = "auto"
    device: Device = "auto"
    compile: Compile = False
    chat_template: ChatTemplate = None
    max_model_len: MaxModelLen = None
    quantization: Quantization = None
    kv_cache_dtype: KVCacheDType = "auto"
    state_memory: StateMemory = None
    host_memory: HostMemory = None
    weights: Weights = None
    adapter: Adapter = None
    reuse: Reuse = None
    recompute: Recompute = None
    promote: Promote = None
    across_adapters: AcrossAdapters = None
    tolerance: ReuseTolerance = str(DEFAULT)
    positions: Annotated[
        str | None, typer.Option(help="schema or packed; packed where the model allows it, if not given.")
    ] = None
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 128
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the most probable token; the model's own or else 0, if not given."),
    ] = None
    generation_config: Annotated[
        str, typer.Option(help="auto: sample as the model's generation_config.json says; off.")
    ] = "auto"
    profile: Annotated[
        str, typer.Option(help="auto: find out how much modules' tokens move, for recompute profiled; off.")
    ] = "auto"
    speculation: Speculation = "lookup"
    seed: Annotated[int, typer.Option(help="Of the draws, and of random weights.")] = 0
    store: Store = None
    store_bytes: StoreBytes = "16GiB"
    eviction: Eviction = DEFAULT_EVICTION
    store_codec: StoreCodec = "none"
    store_shared: StoreShared = None

    def check(self) -> None:
        """Raise ParameterError for a value that is wrong for every model."""
        if self.max_tokens < 1:
            raise ParameterError(
                f"max_tokens is {self.max_tokens}; it must be at least 1: write --max-tokens 1, or more"
            )
        _ = self.policy, self.template
        self.adapters()

    @cached_property
    def policy(self) -> ReusePolicy | None:
        """Return the reuse policy, or None for the engine's default. Raises PolicyError."""
        return policy_of(self.reuse, self.recompute, self.promote, self.across_adapters, self.tolerance)

    @cached_property
    def template(self) -> str | None:
        """Return the chat template that replaces the model's own. Raises ParameterError."""
        return read_template(self.chat_template)

    def adapters(self, model: str | None = None) -> dict[str, str]:
        """Return adapter folders by name. Raises ParameterError, also for an adapter with the model's name."""
        return adapters_of(self.adapter, () if model is None else (model,))

    def load_llm(self, model: str) -> LLM:
        """Load a model for calls that step the engine themselves. Raises InlayError."""
        with told_loading("the libraries"):
            from inlay.client.llm import LLM
        settings = self._settings(model)
        with told_loading(f"the model {clip(model)}"):
            llm = LLM(model, **settings)
        _report(llm, settings["store"])
        return llm

    def load_async(self, model: str) -> AsyncLLM:
        """Load a model whose engine has a thread of its own. Raises InlayError."""
        with told_loading("the libraries"):
            from inlay.client.async_llm import AsyncLLM
        settings = self._settings(model)
        with told_loading(f"the model {clip(model)}"):
            llm = AsyncLLM(model, **settings)
        _report(llm, settings["store"])
        return llm

    def sampling(self, llm: LLM | AsyncLLM) -> SamplingParams:
        """Return the sampling parameters: the options, then the model's defaults, then greedy."""
        from inlay.sampling.params import SamplingParams

        return SamplingParams(**{"temperature": 0.0, **llm.sampling_defaults, **self._sampling()})

    def _sampling(self) -> dict[str, Any]:
        given: dict[str, Any] = {"max_tokens": self.max_tokens, "seed": self.seed}
        return given if self.temperature is None else {**given, "temperature": self.temperature}

    def _settings(self, model: str) -> dict[str, Any]:
        """Return the arguments of LLM and AsyncLLM. Raises ParameterError."""
        from inlay.sampling.params import SamplingParams

        SamplingParams(**self._sampling())  # errors are reported before a model is loaded
        return {
            "dtype": self.dtype,
            "device": self.device,
            "compile": self.compile,
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "state_memory": self.state_memory,
            "host_memory": self.host_memory,
            "weights": self.weights,
            "adapters": self.adapters(model),
            "reuse": self.policy,
            "tolerance": self.tolerance,
            "positions": self.positions,
            "seed": self.seed,
            "generation_config": self.generation_config,
            "profile": self.profile,
            "speculation": self.speculation,
            "chat_template": self.template,
            "max_model_len": self.max_model_len,
            "store": store_of(self.store, model),
            "store_bytes": self.store_bytes,
            "eviction": self.eviction,
            "store_codec": self.store_codec,
            "store_shared": self.store_shared,
        }


def _report(llm: LLM | AsyncLLM, store: str) -> None:
    """Print notes about a loaded model on stderr."""
    notes = (llm.loaded.note, told_device(str(llm.loaded.model.device)), told_store(llm.stats(), store))
    for line in (*notes, *map(str, llm.adapters.values())):
        if line:
            print(f"inlay: {line}", file=sys.stderr)


def with_model_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of ModelOptions; it gets them as the argument ``options``.

    Args:
        defaults: defaults that differ from those of ModelOptions.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command)
        hints = get_type_hints(command, include_extras=True)
        annotated = get_type_hints(ModelOptions, include_extras=True)
        options = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(each.name, each.default),
                annotation=annotated[each.name],
            )
            for each in fields(ModelOptions)
        ]
        names = {each.name for each in options}

        def called(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in names & given.keys()}
            command(**given, options=ModelOptions(**chosen))

        taken = [
            each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for each in own.parameters.values()
            if each.name != "options"
        ]
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__annotations__ = {each.name: each.annotation for each in (*taken, *options)}
        called.__signature__ = own.replace(parameters=[*taken, *options])  # type: ignore[attr-defined]
        return called

    return decorate
