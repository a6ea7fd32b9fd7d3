"""``inlay deploy``: runs a cluster on Ray Serve from one YAML file."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.errors import InlayError, ParameterError

if TYPE_CHECKING:
    from inlay.cluster.settings import ClusterSettings


_OBJECTS = 200 * 2**20  # bytes of Ray's shared memory, enough because requests and events are small


def deploy(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="What to run; docs/guides/clusters.md has all of it.")
    ],
    address: Annotated[
        str | None,
        typer.Option(help="Of a Ray cluster that runs, or auto; a new one on this machine, if not given."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="End when all is up, and leave it running. Needs --address.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the file and print the settings for Ray Serve. Start nothing.")
    ] = False,
) -> int:
    """Run replicas of a model behind one address. Requests go to the replica that has most of their text in its cache.

    When the replicas answer, one line on stdout has the address. Ctrl-C or SIGTERM ends the cluster; --detach leaves it
    running.
    """
    from inlay.cluster.settings import ClusterSettings

    settings = ClusterSettings.read(config)
    if dry_run:
        print(serve_config(settings), end="")
        return 0
    from inlay.cli.pml_files import schema_file

    for file in settings.schemas.files:
        schema_file(file)  # fail here, not in a replica
    if detach and address is None:
        raise ParameterError("--detach leaves a cluster running that others started; give its --address, or auto")
    _require_ray()
    import ray
    from ray import serve

    from inlay.cluster.application import build

    application = build(settings.to_dict())
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = {"include_dashboard": False, "object_store_memory": _OBJECTS} if address is None else {}
    try:
        ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING, **local)
        http = {"host": settings.http.host, "port": settings.http.port}
        serve.start(http_options=http)
        serve.run(application, name=settings.name, route_prefix=settings.route_prefix)
    except (RuntimeError, ConnectionError, ValueError) as error:
        ray.shutdown()
        raise InlayError(f"the cluster could not be started: {error}", code="cluster.not_started") from error
    root = "" if settings.route_prefix == "/" else settings.route_prefix
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.http.host, settings.http.host)
    names = ", ".join(settings.server_settings().served_names)
    end = "serve shutdown ends it" if detach else "Ctrl-C ends"
    print(f"inlay: serving {names} on http://{host}:{settings.http.port}{root}/v1 ({end})", flush=True)
    if detach:
        return 0
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    over.wait()
    print("inlay: requests under way may end; then the replicas go", file=sys.stderr, flush=True)
    serve.delete(settings.name)
    if address is None:
        serve.shutdown()
    ray.shutdown()
    return 0


def serve_config(settings: ClusterSettings) -> str:
    """Return a file for Ray's ``serve deploy``, and for ``serveConfigV2`` of KubeRay."""
    import yaml

    config = {
        "http_options": {"host": settings.http.host, "port": settings.http.port},
        "applications": [
            {
                "name": settings.name,
                "route_prefix": settings.route_prefix,
                "import_path": "inlay.cluster.application:build",
                "args": settings.to_dict(),
            }
        ],
    }
    return str(yaml.safe_dump(config, sort_keys=False))


def _require_ray() -> None:
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ParameterError(
            f"a cluster needs Ray Serve ({error}); install it with: pip install 'inlay-llm[cluster]'"
        ) from None
