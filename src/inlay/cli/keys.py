"""``inlay keys``: makes, lists and revokes the keys of a server, and sets tenants' limits."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.errors import ParameterError

if TYPE_CHECKING:
    from inlay.server.limits import Limits
    from inlay.server.tenants import KeyFile

app = typer.Typer(help="Make, list and revoke the API keys of a server.", no_args_is_help=True)

_File = Annotated[Path, typer.Option(help="The file of keys, which the server is given with --keys.")]
_Tenant = Annotated[str, typer.Option(help="Whose key it is. All keys of a tenant share its cache and its limits.")]
_Requests = Annotated[int | None, typer.Option(min=1, help="The most requests in a minute.")]
_Tokens = Annotated[int | None, typer.Option(min=1, help="The most tokens in a minute, of prompts and answers.")]
_Concurrent = Annotated[
    int | None, typer.Option(min=1, help="The most answers at the same time; every prompt of a request has n.")
]
_Reuse = Annotated[str | None, typer.Option(help="The most reuse a request may ask for: off, exact, auto or modular.")]
_Answer = Annotated[int | None, typer.Option(min=1, help="The most tokens of one answer.")]
_Pinned = Annotated[int | None, typer.Option(min=1, help="The most bytes of the KV pool that its pins may take.")]


@app.command()
def add(
    file: _File,
    tenant: _Tenant,
    admin: Annotated[bool, typer.Option("--admin", help="The key may also change what is public.")] = False,
    requests_per_minute: _Requests = None,
    tokens_per_minute: _Tokens = None,
    max_concurrent: _Concurrent = None,
    max_reuse: _Reuse = None,
    max_tokens: _Answer = None,
    max_pinned_bytes: _Pinned = None,
) -> None:
    """Make a key and print it. It is shown only once, because the file has only its hash.

    Limits belong to the tenant. Give them with its first key, and change them later with inlay keys limit.
    """
    from inlay.server.limits import NO_LIMITS, Limits
    from inlay.server.tenants import check_tenant, editing

    check_tenant(tenant)
    limits = Limits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
        max_reuse=max_reuse,
        max_tokens=max_tokens,
        max_pinned_bytes=max_pinned_bytes,
    )
    with editing(file) as keys:
        known = keys.tenants.get(tenant)
        if known is not None and limits not in (NO_LIMITS, known.limits):
            raise ParameterError(
                f"{file}: the tenant {tenant!r} exists, with {_shown(known.limits)}; add the key without limits, and "
                "change them with inlay keys limit"
            )
        key, key_id = keys.add(tenant, admin=admin)
        if known is None:
            keys.tenants[tenant].limits = limits
    print(key)
    print(f"inlay: this is key {key_id} of {tenant!r}; keep it, it is not shown again", file=sys.stderr)


@app.command()
def limit(
    file: _File,
    tenant: _Tenant,
    requests_per_minute: _Requests = None,
    tokens_per_minute: _Tokens = None,
    max_concurrent: _Concurrent = None,
    max_reuse: _Reuse = None,
    max_tokens: _Answer = None,
    max_pinned_bytes: _Pinned = None,
) -> None:
    """Set the limits of a tenant. Limits that are not given are removed."""
    from inlay.server.limits import Limits
    from inlay.server.tenants import editing

    limits = Limits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
        max_reuse=max_reuse,
        max_tokens=max_tokens,
        max_pinned_bytes=max_pinned_bytes,
    )
    with editing(file) as keys:
        if tenant not in keys.tenants:
            raise ParameterError(f"{file}: there is no tenant {tenant!r:.80}; inlay keys list shows them")
        keys.tenants[tenant].limits = limits
    print(f"{tenant}: {_shown(limits)}")


@app.command("list")
def list_keys(
    file: _File,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of a table.")] = False,
) -> None:
    """Show keys and tenants. Neither keys nor their hashes are shown."""
    from inlay.server.tenants import read_keys

    keys, _ = read_keys(file)
    if as_json:
        print(json.dumps(_described(keys)))
        return
    _print_table(keys)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Of the key, as inlay keys list shows it.")], file: _File
) -> None:
    """Revoke a key. A running server refuses it within a second."""
    from inlay.server.tenants import editing

    with editing(file) as keys:
        key = keys.keys.pop(key_id, None)
        if key is None:
            raise ParameterError(f"{file}: there is no key {key_id!r:.80}; inlay keys list shows their ids")
    print(f"{key_id} of {key.tenant!r} is revoked")


def _given(limits: Limits) -> dict[str, Any]:
    return {name: value for name, value in asdict(limits).items() if value is not None}


def _shown(limits: Limits) -> str:
    given = _given(limits)
    return ", ".join(f"{name} {value}" for name, value in given.items()) if given else "no limits"


def _described(keys: KeyFile) -> dict[str, Any]:
    return {
        "keys": [
            {"id": key_id, "tenant": key.tenant, "admin": key.admin, "created": key.created}
            for key_id, key in keys.keys.items()
        ],
        "tenants": [{"name": name, "limits": _given(tenant.limits)} for name, tenant in keys.tenants.items()],
    }


def _print_table(keys: KeyFile) -> None:
    from rich.table import Table

    from inlay.cli.output import stdout_console

    table = Table(box=None, pad_edge=False)
    for column in ("tenant", "limits", "key", "admin", "created"):
        table.add_column(column, overflow="fold")
    for name, tenant in sorted(keys.tenants.items()):
        own = [(key_id, key) for key_id, key in keys.keys.items() if key.tenant == name]
        for key_id, key in own:
            table.add_row(name, _shown(tenant.limits), key_id, "yes" if key.admin else "no", key.created)
        if not own:
            table.add_row(name, _shown(tenant.limits), "none", "", "")
    stdout_console().print(table, markup=False)
