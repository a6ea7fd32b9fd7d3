"""Options that several commands share, and parsers of option values."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.loading import told_loading
from inlay.errors import ParameterError, PMLError, Problem
from inlay.kv.offload.tier import Kept
from inlay.kv.policies import POLICIES
from inlay.pml import Prompt, Schema
from inlay.pml.json_objects import parse_json
from inlay.pml.parser import parse
from inlay.pml.problems import Problems
from inlay.pml.sources import document_from_file, is_json
from inlay.policy import PolicyFields, ReusePolicy
from inlay.tolerance import DEFAULT, Tolerance
from inlay.wording import clip

if TYPE_CHECKING:
    from inlay.types import EngineStats


_MOST_THREADS = 1024


def announce_hub(model: str) -> str:
    """Return a model's name, after a line on stderr if it is looked up on the hub."""
    here = model == "demo" or model.startswith("random:") or os.path.exists(model)
    path = model.startswith((".", "/")) or model.endswith((".gguf", "/")) or model.count("/") > 1
    if model and not here and not path and not _offline():
        print(f"inlay: {clip(model)} is no folder here; it is looked up on the Hugging Face hub", file=sys.stderr)
    return model


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _announce_hubs(models: list[str]) -> list[str]:
    return [announce_hub(model) for model in models]


Model = Annotated[
    str, typer.Option(help="A directory, a GGUF file, a hub name, random:<shape>, or demo.", callback=announce_hub)
]
Models = Annotated[
    list[str],
    typer.Option(
        "--model", help="A directory, a hub name, random:<shape>, or demo; repeatable.", callback=_announce_hubs
    ),
]
Tokenizer = Annotated[
    str, typer.Option(help="Whose tokenizer counts: a directory, a hub name, or demo.", callback=announce_hub)
]
DType = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Quantization = Annotated[
    str | None, typer.Option(help="int8 or int4: keep the weights in so many bits; as they are, if not given.")
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="packed for speed on the CPU, or stock for the model as transformers makes it, as on a GPU, if not given."
    ),
]
Device = Annotated[str, typer.Option(help="auto: a GPU where there is one; cpu, cuda, or cuda:1 for the second.")]
Compile = Annotated[
    bool, typer.Option("--compile", help="Run the model through torch.compile, which takes a while at the start.")
]
Reuse = Annotated[
    str | None, typer.Option(help=f"Reuse policy: {PolicyFields.help('reuse')} (docs/reference/policies.md).")
]
Recompute = Annotated[str | None, typer.Option(help=f"Of that policy: {PolicyFields.help('recompute')}.")]
Promote = Annotated[
    bool | None,
    typer.Option("--promote/--no-promote", show_default=False, help=f"Of that policy: {PolicyFields.help('promote')}."),
]
AcrossAdapters = Annotated[
    bool | None,
    typer.Option(
        "--across-adapters/--no-across-adapters",
        show_default=False,
        help=f"Of that policy: {PolicyFields.help('across_adapters')}.",
    ),
]
ReuseTolerance = Annotated[
    str, typer.Option(help=f"Tolerance {PolicyFields.help('tolerance')} (docs/guides/check-prompts.md).")
]
Adapter = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="A LoRA adapter of the model: what requests call it, and its folder as PEFT writes it. Several times for "
        "several (docs/guides/adapters.md).",
    ),
]
ChatTemplate = Annotated[
    Path | None, typer.Option(help="A file with a chat template (Jinja), in place of the model's own.")
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens of a prompt and its answer; what the model has positions for, if not given.")
]
Shadow = Annotated[
    float,
    typer.Option(
        help="The share of answers, of those that read modules as approximations, that is run again in full in idle "
        "time; 0 for none."
    ),
]
ShadowThreshold = Annotated[
    float,
    typer.Option(
        help="Nats a token that a schema's answers may be from full prefill before they get a safer policy; 0 for any."
    ),
]
PromotionMemory = Annotated[
    float,
    typer.Option(
        help="The share of the pool for combinations of modules that are asked for again and encoded exactly in idle "
        "time; 0 leaves that out."
    ),
]
Profile = Annotated[
    bool, typer.Option("--profile", help="Encode it as well, and say how much each module depends on the others.")
]
Store = Annotated[
    str | None,
    typer.Option(
        help="Where encoded modules of public schemas outlive the process: a folder, or off. If not given, INLAY_STORE "
        "or the user's cache directory, and off for random: models."
    ),
]
Eviction = Annotated[
    str,
    typer.Option(
        help=f"What goes first where the pool or the store is full: {', '.join(POLICIES)} (docs/guides/cache-tiers.md)."
    ),
]
StoreBytes = Annotated[str, typer.Option(help="The most that folder may hold.")]
StoreCodec = Annotated[
    str,
    typer.Option(
        help="The form in which they are written: none, or int8 or fp8 in about half the bytes, as an approximation."
    ),
]
StoreShared = Annotated[
    str | None,
    typer.Option(
        envvar="INLAY_STORE_SHARED",
        help="A Valkey or Redis server that shares them among servers, like redis://host:6379/0. The environment is "
        "not seen by others, as command lines are.",
    ),
]
KVCacheDType = Annotated[
    str,
    typer.Option(
        help="What keys and values are in the pool: auto, the model's dtype, or int8, or fp8 on a GPU, in about half "
        "the bytes of bf16."
    ),
]
KVMemory = Annotated[
    str | None, typer.Option(help="Of the KV pool, like 4GiB; a quarter of what is free, if not given.")
]
StateMemory = Annotated[
    str | None,
    typer.Option(help="Of --kv-memory, for the states of models with recurrent layers, like 1GiB; half, if not given."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help="Of the host, for modules that the KV pool of a GPU has no room for, like 16GiB; 0 for none; 4GiB, if not "
        "given. On a CPU the two are one, and this says nothing."
    ),
]
DefaultMaxTokens = Annotated[
    int | None,
    typer.Option(help="For requests that do not say; if not given, OpenAI's: 16 for completions, none for chats."),
]
GenerationConfig = Annotated[
    str, typer.Option(help="auto: requests that do not say get what the model's generation_config.json says; off.")
]
ToolParser = Annotated[
    str | None,
    typer.Option(
        help="How the model writes tool calls: hermes, qwen3_coder, mistral, …; told from its chat template, if not "
        "given."
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(help="How the model writes what it thinks, or off; told from its chat template, if not given."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON in place of tables.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw it into this .png, .svg or .pdf file.")]


def _use_threads(threads: int | None) -> int | None:
    """Set the number of threads for models. Call it before torch loads, because OpenMP reads the variable then."""
    if threads is None:
        return None
    if not 1 <= threads <= _MOST_THREADS:
        raise ParameterError(f"--threads is {threads}; it must be a number from 1 to {_MOST_THREADS:,}")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:  # in a process that runs several commands
        sys.modules["torch"].set_num_threads(threads)
    return threads


Threads = Annotated[
    int | None,
    typer.Option(
        callback=_use_threads,
        expose_value=False,
        help="Cores that compute, OMP_NUM_THREADS; all of the machine, if neither is given. Several processes on one "
        "machine should share its cores.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Sizes that take seconds: for trying it out, not for figures.")]
Runs = Annotated[int, typer.Option(help="Runs of each, more where they are short; medians are reported.")]


def deviations_of(schemas: Sequence[Schema], model: str) -> list[dict[str, float]]:
    """The deviation of each module of each schema behind other modules; "" for text outside modules."""
    with told_loading("the libraries"):
        from inlay.client.llm import LLM
    with told_loading(f"the model {clip(model)}"):
        llm = LLM(model, seed=0)
    found = []
    for schema in schemas:
        llm.add_schema(schema)
        found.append(llm.deviations(schema.name))
    return found


def adapters_of(given: Sequence[str] | None, taken: Sequence[str] = ()) -> dict[str, str]:
    """Parse adapter folders by name. ``taken`` are the model's names. Raises ParameterError."""
    found: dict[str, str] = {}
    for one in given or ():
        name, equals, folder = one.partition("=")
        if not (name and equals and folder):
            raise ParameterError(f"--adapter is {clip(one)!r}; write NAME=PATH, as in --adapter sql=adapters/sql")
        if name in found or name in taken:
            what = "two adapters are" if name in found else "an adapter and its model are"
            raise ParameterError(f"--adapter {clip(one)}: {what} called {clip(name)!r}; give each a name of its own")
        found[name] = folder
    return found


def policy_of(
    reuse: str | None,
    recompute: str | None,
    promote: bool | None,
    across_adapters: bool | None,
    tolerance: str = str(DEFAULT),
) -> ReusePolicy | None:
    """Return the policy of a command's options, or None. A deprecated one is named on stderr. Raises PolicyError.

    ``tolerance`` is the default of every ``auto`` of the engine. It is not part of the policy.
    """
    Tolerance.parse(tolerance, f"--tolerance {clip(tolerance)}")
    policy = PolicyFields(reuse, recompute, promote, across_adapters).policy(options=True, deprecated=_warn)
    if policy is not None and policy.auto and tolerance != str(DEFAULT):
        PolicyFields(reuse, tolerance=tolerance).policy(options=True, deprecated=_warn)  # refuses a second tolerance
    return policy


def _warn(message: str) -> None:
    print(f"inlay: {message}", file=sys.stderr)


def words(text: str) -> tuple[str, ...]:
    """Split words at commas, without repetitions."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def counts(option: str, text: str) -> tuple[int, ...]:
    """Split whole numbers at commas. Raises ParameterError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(f"{option} is '{text}'; write a number, or several with commas: 1024,2048") from None


def schema_file(path: Path) -> Schema:
    """Read a schema file. Raises PMLError, with advice if it holds a prompt."""
    try:
        return Schema.from_file(path)
    except PMLError as error:
        if _kind(path) != "prompt":
            raise
        of = ""
        with suppress(PMLError):  # the prompt may be wrong, too
            of = f", of schema '{Prompt.from_file(path).schema}'"
        raise _refused(
            error,
            f"this is a prompt{of}; give that schema's file here (inlay run takes both: SCHEMA --prompt PROMPT)",
        ) from None


def prompt_file(path: str, option: str = "--prompt") -> Prompt:
    """Read a prompt from a file, or from standard input for "-". Raises PMLError and ParameterError."""
    if path == "-":
        return Prompt.from_string(standard_input(), source="<stdin>")
    if not os.path.exists(path):
        raise ParameterError(
            f"{clip(path)}: no such file; {option} takes a file that holds a prompt, such as "
            '<prompt schema="…"><module/>Who?</prompt>, or - for standard input'
        )
    try:
        return Prompt.from_file(path)
    except PMLError as error:
        if _kind(Path(path)) != "schema":
            raise
        name, this = "…", "a schema"
        with suppress(PMLError):  # the schema may be wrong, too
            name = Schema.from_file(path).name
            this = f"the schema '{name}'"
        remedy = f'write one, such as <prompt schema="{name}">…</prompt>'
        raise _refused(error, f"this is {this}, and {option} takes a prompt of it; {remedy}") from None


def kind_of(path: Path) -> str:
    """Tell by a file's outermost tag or keys if it is a schema, a prompt or neither. Raises PMLError."""
    data, source = document_from_file(path), str(path)
    if is_json(source):
        root = parse_json(data, source)
        keys = [key for key in ("name", "schema") if isinstance(root, dict) and key in root]
        return {"name": "schema", "schema": "prompt"}[keys[0]] if keys else ""
    element = parse(data, Problems(source), declaration_counts=True)
    return "" if element is None else element.tag


def _kind(path: Path) -> str:
    with suppress(PMLError):
        return kind_of(path)
    return ""


def _refused(error: PMLError, sentence: str) -> PMLError:
    return PMLError([Problem(error.problems[0].place, sentence)])


def standard_input() -> str:
    """Read standard input. Raises ParameterError unless it is UTF-8."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ParameterError("<stdin>: is not UTF-8; send the prompt as UTF-8") from None


def read_template(path: Path | None) -> str | None:
    """Read a chat template; None for the model's own. Raises ParameterError for an invalid one."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ParameterError(f"--chat-template {path} is not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise ParameterError(
            f"--chat-template {path} cannot be read ({error.strerror}); give a file that you may read"
        ) from None
    from inlay.prompt.inputs import check_template

    return check_template(text, str(path))


def check_plot(path: Path | None) -> None:
    """Raise ParameterError if a plot could not be saved, before minutes of work."""
    from inlay.authoring.plot.figure import check_plot_file

    if path is not None:
        check_plot_file(path)


def store_of(given: str | None, model: str) -> str:
    """Return the store of a command that has one by default: a folder, or "off"."""
    said = given if given is not None else os.environ.get("INLAY_STORE")
    if said or model.startswith("random:"):
        return said or "off"
    from inlay.models.fingerprint_cache import cache_root

    root = cache_root()
    if root is None:
        return "off"
    try:  # the default store fails silently, because the user did not ask for it
        (root / "store").mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return "off"
    return str(root / "store")


def told_device(device: str) -> str | None:
    """Return the line that names the GPU; None for the CPU."""
    if device == "cpu":
        return None
    import torch

    return f"computing on {device}, {torch.cuda.get_device_name(device)}"


_TOLD_KEPT = {
    Kept.SCHEMAS: "; marked parts of messages are not kept (--store-private keeps them)",
    Kept.UNSALTED: "; marked parts of messages are kept too (--no-store-private keeps none)",
    Kept.ALL: "; marked parts of messages and private schemas are kept too",
}


def told_store(stats: EngineStats, store: str, kept: Kept | None = None) -> str | None:
    """Return the line that says where encoded modules are kept, or None where there is no store.

    Args:
        kept: which segments the store holds. None for a command that reads no messages.
    """
    messages = "" if kept is None else _TOLD_KEPT[kept]
    shared = None
    if stats.shared is not None:
        shared = "on the shared store" if stats.shared.up else "on the shared store once that is reached"
    if stats.disk is None:
        return None if shared is None else f"encoded modules are kept {shared}{messages}"
    size, quota = (f"{amount / 2**30:.1f}" for amount in (stats.disk.bytes, stats.disk.quota))
    beside = "" if shared is None else f", and {shared}"
    return f"encoded modules are kept in {store} ({size} of {quota} GiB; --store off keeps none){beside}{messages}"
