"""``inlay bench``: measurements that users can repeat, a file for each."""

from __future__ import annotations

import typer

from inlay_lab.cli.bench_agent import agent
from inlay_lab.cli.bench_content import content
from inlay_lab.cli.bench_eviction import eviction
from inlay_lab.cli.bench_kernels import attention, decode
from inlay_lab.cli.bench_peers import peers
from inlay_lab.cli.bench_speculation import speculation
from inlay_lab.cli.bench_throughput import throughput
from inlay_lab.cli.bench_ttft import encode, ttft

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
for _command in (ttft, encode, decode, throughput, speculation, attention, eviction, agent, content, peers):
    app.command()(_command)


@app.callback()
def _bench() -> None:
    """Measure speed on this machine."""
