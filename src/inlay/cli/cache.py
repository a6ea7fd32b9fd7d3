"""``inlay cache``: shows, pins, moves and removes the segments of a store."""

from __future__ import annotations

import json
import math
import os
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from inlay.cli.cache_source import CacheSource, FolderCache, RefusedFileError, RunningCache
from inlay.cli.options import AsJson, StoreBytes, announce_hub, store_of
from inlay.cli.output import check_outputs, token_progress, told_loading
from inlay.cli.pml_files import schema_file
from inlay.cli.settings import Options, with_settings
from inlay.errors import ParameterError
from inlay.pml import Schema
from inlay.settings import WARM
from inlay.strict_json import JSONError, read_json
from inlay.wording import clip

if TYPE_CHECKING:
    from inlay.client.llm import LLM
    from inlay.client.warm_plan import PlanEntry, PlannedText


_FORM = 'write {"text": …} or {"schema": FILE, "module": PATH}, with "expected" as a number above 0'
_MOST_BYTES = 128 << 20


def read_plan(path: Path) -> tuple[list[PlanEntry], dict[str, Schema]]:
    """Read a plan, JSON lines, with the schemas that it names, by name.

    Raises:
        ParameterError: for a wrong line, with its number.
        PMLError: for a wrong schema.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ParameterError(f"{path}: the plan is larger than 128 MiB; give it in parts")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ParameterError(f"{path}: cannot be read ({error.strerror}); give a plan of JSON lines") from None
    schemas: dict[Path, Schema] = {}
    plan = [
        _entry(line, f"{path}:{number}", path.parent, schemas) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not plan:
        raise ParameterError(f"{path} holds no entries; {_FORM} on each line")
    return plan, {schema.name: schema for schema in schemas.values()}


def _entry(line: bytes, where: str, folder: Path, schemas: dict[Path, Schema]) -> PlanEntry:
    from inlay.client.warm_plan import PlanEntry

    try:
        value = read_json(line)
    except JSONError as error:
        raise ParameterError(f"{where}: {error.fault.value}; {_FORM}") from None
    if not isinstance(value, dict):
        raise ParameterError(f"{where}: this is no object; {_FORM}")
    expected = value.pop("expected", 1)
    if isinstance(expected, bool) or not isinstance(expected, int | float) or not 0 < expected < math.inf:
        raise ParameterError(f"{where}: expected is {clip(repr(expected))}; {_FORM}")
    text, messages = value.get("text"), value.get("messages", [])
    if isinstance(text, str) and isinstance(messages, list) and value.keys() <= {"text", "messages"}:
        return PlanEntry(float(expected), text=text, messages=messages)
    schema, module = value.get("schema"), value.get("module")
    if isinstance(schema, str) and isinstance(module, str) and value.keys() == {"schema", "module"}:
        file = folder / schema
        if file not in schemas:
            if not file.is_file():
                raise ParameterError(f"{where}: {clip(schema)}: no such file; give a schema's, relative to the plan")
            parsed = schema_file(file)
            if any(other.name == parsed.name for other in schemas.values()):
                raise ParameterError(f"{where}: another file has the schema '{parsed.name}', too; give one of them")
            schemas[file] = parsed
        return PlanEntry(float(expected), schema=schemas[file].name, module=module)
    raise ParameterError(f"{where}: the entry has wrong fields; {_FORM}")


def as_rows(planned: Sequence[PlannedText]) -> list[dict[str, Any]]:
    """Return the outcome as JSON values, the best first."""
    ranked = sorted(planned, key=lambda one: -one.entry.expected)
    return [
        {
            **(
                {"text": one.entry.text}
                if one.entry.text is not None
                else {"schema": one.entry.schema, "module": one.entry.module}
            ),
            "expected": one.entry.expected,
            "tokens": one.tokens,
            "bytes": one.bytes,
            "state": one.state,
            "saved_s_per_byte": one.saved_s_per_byte,
        }
        for one in ranked
    ]


def show_plan(planned: Sequence[PlannedText]) -> None:
    """Print a table of the outcome, the best first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("text", max_width=40, no_wrap=True)
    for name in ("expected", "tokens", "MiB", "s/MiB"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in as_rows(planned):
        rate = row["saved_s_per_byte"]
        name = row["text"].strip() if "text" in row else f"{row['schema']}/{row['module']}"
        table.add_row(
            clip(name).replace("[", "\\["),
            f"{row['expected']:,g}",
            f"{row['tokens']:,}",
            f"{row['bytes'] / 2**20:,.1f}",
            "-" if rate is None else f"{rate * 2**20:,.3g}",
            row["state"],
        )
    Console(soft_wrap=True).print(table)


_HELP = "Show and change what the store on disk holds, or the cache of a server that runs."
app = typer.Typer(help=_HELP, no_args_is_help=True)

_Folder = Annotated[
    str | None, typer.Option("--store", help="The folder; if not given, INLAY_STORE or the user's cache directory.")
]
_Keys = Annotated[list[str] | None, typer.Argument(metavar="KEY...", help="Beginnings of keys, as ls shows them.")]
_Key = Annotated[str, typer.Argument(metavar="KEY", help="The beginning of a key, as ls shows it.")]
_Url = Annotated[str | None, typer.Option(help="A server that runs, like http://127.0.0.1:8000, in place of a folder.")]
_ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="INLAY_API_KEY",
        help="For --url: whose segments. Others can read command lines, not the environment.",
    ),
]
_All = Annotated[bool, typer.Option("--all", help="All of them.")]


@app.command()
def ls(store: _Folder = None, as_json: AsJson = False, url: _Url = None, api_key: _ApiKey = None) -> None:
    """List the segments: in a folder the least recently used first, on a server by key."""
    with _opened(store, url, api_key) as cache:
        rows, place = cache.rows(), cache.place
    if as_json:
        print(json.dumps(rows))
        return
    if not rows and place is not None:
        print(f"inlay: nothing is stored in {place}", file=sys.stderr)
        return
    for line in cache.table(rows):
        print(line)


@app.command()
def show(key: _Key, store: _Folder = None, url: _Url = None, api_key: _ApiKey = None) -> None:
    """Print the stored description of one segment as JSON, with its token ids."""
    with _opened(store, url, api_key) as cache:
        (row,) = cache.chosen([key])
        print(json.dumps(cache.describe(row), indent=2))


@app.command()
def pin(
    keys: _Keys = None, every: _All = False, store: _Folder = None, url: _Url = None, api_key: _ApiKey = None
) -> None:
    """Protect segments from eviction: in the folder, or in the memory of a server until it ends."""
    _pin(keys, every, _opened(store, url, api_key), pinned=True)


@app.command()
def unpin(
    keys: _Keys = None, every: _All = False, store: _Folder = None, url: _Url = None, api_key: _ApiKey = None
) -> None:
    """Let segments be evicted again."""
    _pin(keys, every, _opened(store, url, api_key), pinned=False)


@app.command()
def evict(
    keys: _Keys = None, every: _All = False, store: _Folder = None, url: _Url = None, api_key: _ApiKey = None
) -> None:
    """Remove segments, even pinned ones.

    Running processes keep their copies in memory; a server (--url) removes its own.
    """
    with _opened(store, url, api_key) as cache:
        if every and not keys:
            segments, size, left = cache.evict_all()
        else:
            rows = cache.chosen(keys, every=every)
            segments, size, left = len(rows), sum(row["bytes"] for row in rows), 0
            for row in rows:
                cache.evict(row)
    print(f"evicted {segments:,} segments, {size / 2**20:,.1f} MiB")
    if left:
        print(f"{left:,} segments of public schemas stay: only an admin may evict them", file=sys.stderr)


@app.command()
def verify(store: _Folder = None, url: _Url = None, api_key: _ApiKey = None) -> int:
    """Read every file and remove damaged ones. Exit status 1 if a file was damaged."""
    with _opened(store, url, api_key) as cache:
        whole, damaged = cache.verify(print)
    print(f"{whole:,} segments are whole, {damaged:,} were damaged")
    return 1 if damaged else 0


@app.command()
def stats(store: _Folder = None, as_json: AsJson = False, url: _Url = None, api_key: _ApiKey = None) -> None:
    """Print counts and sizes: of a folder by model and codec, of a server by tier."""
    with _opened(store, url, api_key) as cache:
        found = cache.stats()
    if as_json:
        print(json.dumps(found))
        return
    for line in cache.summary(found):
        print(line)


@app.command(name="export")
def export_(
    file: Annotated[Path, typer.Argument(help="The tar file to write.")],
    keys: _Keys = None,
    store: _Folder = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite it.")] = False,
    url: _Url = None,
    api_key: _ApiKey = None,
) -> None:
    """Write the named segments, or all, into one tar file. A server gives only segments of its store on disk."""
    check_outputs([file], force)
    draft = file.with_name(f".{file.name}.draft")
    try:
        with _opened(store, url, api_key) as cache:
            written = cache.export(cache.chosen(keys, every=not keys), draft)
        os.replace(draft, file)
    except OSError as error:
        raise ParameterError(f"{file}: cannot be written ({error.strerror}); give another path") from None
    finally:
        draft.unlink(missing_ok=True)
    print(f"exported {written:,} segments to {file}")


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file of inlay cache export.")],
    store: _Folder = None,
    store_bytes: StoreBytes = "16GiB",
    url: _Url = None,
    api_key: _ApiKey = None,
) -> int:
    """Check each segment of a file and add it. Exit status 1 if one was damaged.

    The maker of the file controls the stored keys and values. Import files only from people whom you would trust with
    your model. A server takes files from admins.
    """
    with _opened(store, url, api_key, store_bytes, make=True) as cache:
        cache.check_takes()
        taken, damaged = _import(file, cache)
    print(f"imported {taken:,} segments, {damaged:,} were damaged")
    return 1 if damaged else 0


@app.command()
@with_settings(WARM)
def warm(
    schema: Annotated[
        Path | None, typer.Argument(help="The schema file (PML or JSON); with --url also the name of one.")
    ] = None,
    reuse: Annotated[str, typer.Option(help="isolated, anchored, primed or modular.")] = "modular",
    ttl: Annotated[
        str | None,
        typer.Option(help="How long it is kept when nothing reads it, like 1h; no bound, if not given."),
    ] = None,
    url: _Url = None,
    api_key: _ApiKey = None,
    plan: Annotated[
        Path | None, typer.Option(help="In place of a schema: modules and documents by expected use, as JSON lines.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="For --plan: the most bytes of KV to encode, like 2GiB.")] = None,
    as_json: AsJson = False,
    *,
    options: Options,
) -> None:
    """Encode a schema into the store for later processes, or in a running server (--url)."""
    if plan is not None:
        if schema is not None or url is not None:
            given = "SCHEMA" if schema is not None else "--url"
            raise ParameterError(f"--plan and {given} are both given; a plan names its schemas and warms a folder")
        if budget is None:
            raise ParameterError("--plan needs a bound; give --budget, like 2GiB")
        _warm_plan(plan, budget, reuse, ttl, as_json, options)
        return
    if budget is not None or as_json:
        raise ParameterError(
            f"{'--json' if budget is None else '--budget'} is for --plan; leave it out, or give a plan"
        )
    if schema is None:
        raise ParameterError("there is nothing to warm; give a schema file, or --plan FILE")
    running = _running(options.flag("store"), url, api_key)
    if running is not None:
        _warm_running(running, schema, reuse, ttl)
        return
    parsed = schema_file(schema)
    llm = _loaded(options)
    with token_progress("encoding modules") as progress:
        llm.add_schema(parsed, reuse=reuse, progress=progress, ttl=ttl)
    llm.shutdown()
    done = llm.stats()
    print(f"{done.encoded_tokens:,} tokens encoded, {done.disk_tokens:,} were there")


def _loaded(options: Options) -> LLM:
    """Return the model with the store of the options."""
    with told_loading("the libraries"):
        from inlay.client.llm import LLM

    model = announce_hub(options["model"])
    settings = options.llm_settings(model) | {"store": _folder(options["store"])}
    with told_loading(f"the model {clip(model)}"):
        return LLM(model, **settings)


def _warm_plan(file: Path, budget: str, reuse: str, ttl: str | None, as_json: bool, options: Options) -> None:
    from inlay.settings import parse_bytes

    parse_bytes("--budget", budget)
    plan, schemas = read_plan(file)
    llm = _loaded(options)
    for schema in schemas.values():
        llm.add_schema(schema, encode=False, reuse=reuse, ttl=ttl)
    with token_progress("encoding the plan") as progress:
        planned = llm.warm_plan(plan, budget, reuse=reuse, ttl=ttl, progress=progress)
    llm.shutdown()
    if as_json:
        print(json.dumps(as_rows(planned)))
        return
    show_plan(planned)
    encoded = [one for one in planned if one.state == "encoded"]
    tokens, size = sum(one.tokens for one in encoded), sum(one.bytes for one in encoded)
    left = sum(one.state == "left out" for one in planned)
    print(f"{tokens:,} tokens encoded, {size / 2**20:,.1f} MiB of {budget}; {left:,} entries left out")


def _pin(keys: list[str] | None, every: bool, opened: AbstractContextManager[CacheSource], *, pinned: bool) -> None:
    with opened as cache:
        rows = cache.chosen(keys, every=every)
        for row in rows:
            cache.pin(row, pinned)
    print(f"{'pinned' if pinned else 'unpinned'} {len(rows):,} segments")


def _import(file: Path, cache: CacheSource) -> tuple[int, int]:
    """Import each file of an archive. Returns the numbers of accepted and refused files. Raises ParameterError."""
    taken = damaged = 0
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if content is None:
                    continue
                try:
                    cache.take(content, member.size)
                    taken += 1
                except RefusedFileError as error:
                    damaged += 1
                    print(f"{member.name}: {error}; left out")
    except (OSError, tarfile.TarError) as error:
        raise ParameterError(f"{file} cannot be read ({error}); give a file of inlay cache export") from None
    return taken, damaged


def _running(store: str | None, url: str | None, api_key: str | None) -> RunningCache | None:
    """Return the server's cache; None for a folder. Raises ParameterError."""
    if url is None:
        return None
    if store is not None:
        raise ParameterError("--store names a folder, and --url a server; give one of them")
    return RunningCache(url, api_key)


def _warm_running(running: RunningCache, schema: Path, reuse: str, ttl: str | None) -> None:
    options = {"reuse": reuse} | ({} if ttl is None else {"ttl": ttl})
    name, document = str(schema), None
    if schema.is_file():
        parsed = schema_file(schema)
        name, document = parsed.name, json.loads(parsed.to_json())
    encoded, of = running.warm(name, document, options)
    print(f"{encoded:,} of {of:,} tokens are encoded")


def _folder(store: str | None) -> str:
    folder = store_of(store, "demo")
    if folder == "off":
        raise ParameterError("there is no store; name its folder with --store")
    return folder


@contextmanager
def _opened(
    store: str | None, url: str | None, api_key: str | None, store_bytes: str = "1T", *, make: bool = False
) -> Iterator[CacheSource]:
    """Open the store of a folder or a server. Raises ParameterError.

    ``make`` allows a new folder.
    """
    running = _running(store, url, api_key)
    if running is not None:
        yield running
        return
    from inlay.kv.offload.disk import DiskTier
    from inlay.settings import parse_bytes

    folder = Path(_folder(store))
    if store is not None and not make and not folder.exists():
        raise ParameterError(f"{folder}: no such folder; give that of a store, as inlay cache warm --store makes one")
    with closing(DiskTier(folder, parse_bytes("store_bytes", store_bytes))) as tier:
        yield FolderCache(tier)
