"""``inlay simulate``: a simulated cluster of many replicas and a router, with the costs of one machine."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.options import AsJson, Model, Plot, Threads, check_plot, words
from inlay.cli.output import check_outputs, output_file, stdout_console
from inlay.errors import ParameterError
from inlay_lab.options import floats

if TYPE_CHECKING:
    from inlay_lab.simulate.costs import Costs
    from inlay_lab.simulate.traces import SimulatedRequest

_HEADINGS = ("traffic", "load", "router", "hits", "TTFT mean, ms", "p50", "p99", "busy", "imbalance", "µs", "p99")
_MOST_REPLICAS = 10_000


def simulate(
    trace: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="A trace to replay, JSON lines; drawn, if not given.")
    ] = None,
    zipf: Annotated[str, typer.Option(help="Exponents by which modules are drawn; several with commas.")] = "1.0",
    load: Annotated[
        str | None,
        typer.Option(
            help="Per cent of what replicas serve with nothing stored; several with commas. 60; a trace as it is."
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(help="How many.")] = 100,
    requests: Annotated[
        int | None, typer.Option(help="How many are drawn; 200 a replica. A quarter only warms up.")
    ] = None,
    modules: Annotated[int, typer.Option(help="How many modules there are.")] = 10_000,
    per_prompt: Annotated[int, typer.Option(help="Modules of a prompt; 0 for prompts that share nothing.")] = 4,
    module_tokens: Annotated[int, typer.Option(help="Tokens of a module, on average.")] = 1_000,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a prompt that are its own.")] = 64,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer, on average.")] = 64,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a trace's blocks (hash_ids).")] = 512,
    router: Annotated[
        str, typer.Option(help="Of module, prefix, power-of-two, round-robin; several with commas.")
    ] = "module,prefix,power-of-two,round-robin",
    costs: Annotated[Path | None, typer.Option(help="What things cost: a file of --calibrate.")] = None,
    pool: Annotated[int | None, typer.Option(help="Tokens of a replica's pool; as --costs says.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Measure --model on this machine into this file, and do no more.")
    ] = None,
    model: Model = "demo",
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    memory: Annotated[
        bool, typer.Option("--memory", help="Measure the router's memory too; takes far longer.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files.")] = False,
    as_json: AsJson = False,
    plot: Plot = None,
) -> int:
    """Plan a cluster: hit share, time to the first token and balance of routers, side by side.

    The router is the real one; replicas only count. docs/guides/clusters.md says what the simulator leaves out.
    """
    check_plot(plot)
    if calibrate is not None:
        check_outputs([calibrate], force)
        from inlay_lab.simulate.calibrate import calibrate as measure

        with output_file(calibrate) as write:
            write(measure(model).to_json())
        print(f"inlay: {model} on this machine is in {calibrate}", file=sys.stderr)
        return 0
    from inlay_lab.simulate.run import simulate as run
    from inlay_lab.simulate.traces import ZipfTraffic, read_trace

    routers = _routers(router)
    if not 1 <= replicas <= _MOST_REPLICAS:
        raise ParameterError(f"--replicas is {replicas}; give 1 to {_MOST_REPLICAS:,}")
    if requests is not None and requests < 1:
        raise ParameterError(f"--requests is {requests}; give at least 1")
    spent = _costs(costs, pool)
    drawn: dict[str, list[SimulatedRequest]] = {}
    if trace is not None:
        drawn[trace.name] = read_trace(trace, block_tokens=block_tokens)
    else:
        for exponent in _numbers("--zipf", zipf):
            traffic = ZipfTraffic(
                modules=modules,
                exponent=exponent,
                each=per_prompt,
                module_tokens=module_tokens,
                new_tokens=new_tokens,
                answer_tokens=answer_tokens,
            )
            drawn[f"zipf {exponent:g}"] = traffic.requests(requests or 200 * replicas, seed)
    loads = [None] if load is None and trace is not None else _numbers("--load", load or "60")
    rows: list[dict[str, Any]] = []
    for kind, percent, timed in _timed(drawn, loads, replicas, spent, seed):
        for name in routers:
            found = run(timed, router=name, replicas=replicas, costs=spent, seed=seed, measure_memory=memory)
            share = None if percent is None else percent / 100
            rows.append({"traffic": kind, "load": share, "replicas": replicas, **found.to_dict()})
    result = {"costs": asdict(spent), "seed": seed, "rows": rows}
    if plot is not None:
        from inlay_lab.simulate.plot import draw_simulation

        draw_simulation(rows, plot)
    if not as_json:
        _print_table(rows)
    print(json.dumps(result))
    return 0


def _timed(
    drawn: dict[str, list[SimulatedRequest]],
    loads: Sequence[float | None],
    replicas: int,
    costs: Costs,
    seed: int,
) -> Iterator[tuple[str, float | None, list[SimulatedRequest]]]:
    """Each kind of traffic at each load: a trace in its own rhythm, random traffic as a Poisson process."""
    from inlay_lab.simulate.traces import SimulatedRequest, arrivals

    for kind, made in drawn.items():
        mean = statistics.fmean(costs.service_s(one.wanted.tokens, one.answer) for one in made)
        for percent in loads:
            if percent is None:
                yield kind, None, made
                continue
            rate = percent / 100 * replicas / mean
            if kind.startswith("zipf "):
                yield kind, percent, arrivals(made, rate, seed)
            else:
                scale = len(made) / max(made[-1].at, 1e-9) / rate
                yield kind, percent, [SimulatedRequest(one.at * scale, one.wanted, one.answer) for one in made]


def _print_table(rows: Sequence[dict[str, Any]]) -> None:

    from inlay_lab.cli.bench_tables import make_table, number

    table = make_table(_HEADINGS)
    for row in rows:
        times = (number(1000 * row[name]) for name in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s"))
        table.add_row(
            row["traffic"],
            "—" if row["load"] is None else f"{row['load']:.0%}",
            row["router"],
            f"{row['hit_share']:.0%}",
            *times,
            f"{row['utilization']:.0%}",
            f"{row['imbalance']:.2f}",
            number(row["decision_us"]),
            number(row["decision_us_p99"]),
        )
    stdout_console().print(table)


def _costs(path: Path | None, pool: int | None) -> Costs:
    from dataclasses import replace

    from inlay_lab.simulate.costs import Costs

    costs = Costs() if path is None else Costs.from_file(path)
    return costs if pool is None else replace(costs, pool=pool)


def _routers(text: str) -> tuple[str, ...]:
    from inlay_lab.simulate.routers import ROUTERS

    names = words(text)
    for name in names:
        if name not in ROUTERS:
            raise ParameterError(f"--router is '{name}'; use {', '.join(ROUTERS)}")
    return names


def _numbers(option: str, text: str) -> tuple[float, ...]:
    numbers = floats(option, text, "0.7,1.0")
    if not all(0 <= one < float("inf") for one in numbers):
        raise ParameterError(f"{option} is '{text}'; give numbers of 0 or more")
    if option == "--load" and not all(numbers):
        raise ParameterError("--load is 0; give per cents above 0, such as 30,60,90")
    return numbers
