"""The Grafana dashboard: every query is PromQL, and every metric, label and value that it names is in /metrics."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.model.server.site import COMPLETIONS, Site, with_keys
from tests.pages import DOCS

FILE = DOCS.parent / "examples/grafana/inlay.json"
DASHBOARD = json.loads(FILE.read_text())
#: Labels that Prometheus adds while it scrapes.
SCRAPED = {"job", "instance"}
PROMPT = {
    "pml": '<prompt schema="trip"><sea/><hill/>Where to?</prompt>',
    "max_tokens": 3,
    "reuse": "anchored",
    "temperature": 0,
}
PML = (
    '<schema name="trip">Plan. <module name="sea">By the sea.</module><module name="hill">In the hills.</module>'
    "</schema>"
)

Labels = dict[str, set[str]]  # label → its values


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Labels]:
    """The series of a server that has answered, refused, and compared an answer: sample name → its labels."""
    found: dict[str, Labels] = defaultdict(lambda: defaultdict(set))
    for site in with_keys(tmp_path_factory.mktemp("keys"), shadow=1.0, profile="off"):
        used(site)
        text = site.call("GET", "/metrics", key="root")[2].decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                for label, value in sample.labels.items() or [("", "")]:
                    found[sample.name][label].add(value)
    return found


def used(site: Site) -> None:
    assert site.call("POST", "/v1/schemas", {"pml": PML}, key="ann")[0] == 201
    assert site.call("POST", COMPLETIONS, PROMPT, key="ann")[0] == 200
    assert site.call("POST", COMPLETIONS, {"prompt": "x", "max_tokens": -1}, key="ann")[0] == 400
    stats, end = site.app.state.service.llm.stats, time.monotonic() + 60
    while not stats().shadow.samples:
        assert time.monotonic() < end, "no answer was compared"
        time.sleep(0.02)


def selectors(node: Any) -> Iterator[Any]:
    """Yield the vector selectors of a query, and check its groupings on the way."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    if isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from selectors(argument)
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from selectors(node.lhs)
        yield from selectors(node.rhs)
    elif isinstance(node, promql_parser.AggregateExpr | promql_parser.ParenExpr | promql_parser.SubqueryExpr):
        yield from selectors(node.expr)
    else:
        assert isinstance(node, promql_parser.NumberLiteral | promql_parser.StringLiteral), type(node)


def grouped(node: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield each aggregation of a query with the labels that it groups by."""
    if isinstance(node, promql_parser.AggregateExpr):
        yield node, list(node.modifier.labels) if node.modifier is not None else []
        yield from grouped(node.expr)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from grouped(argument)
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from grouped(node.lhs)
        yield from grouped(node.rhs)


def parsed(query: str) -> Any:
    """A query as Grafana sends it."""
    return promql_parser.parse(query.replace("$__rate_interval", "1m"))


@pytest.mark.parametrize("query", queries())
def test_query_uses_only_existing_metrics_and_labels(query: str, series: dict[str, Labels]):
    tree = parsed(query)
    found = list(selectors(tree))
    assert found
    for selector in found:
        assert selector.name in series, f"{selector.name} is no metric of the server"
        labels = series[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels or matcher.name in SCRAPED, f"{selector.name} has no label {matcher.name}"
            if matcher.op == promql_parser.MatchOp.Equal:
                assert matcher.value in labels[matcher.name]
    for aggregation, names in grouped(tree):
        for selector in selectors(aggregation.expr):
            assert set(names) <= set(series[selector.name]), f"{selector.name} has no {names}"


@pytest.mark.parametrize(
    "panel", [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"], ids=lambda panel: panel["title"]
)
def test_a_legend_names_labels_that_the_query_keeps(panel: dict[str, Any]):
    for target in panel["targets"]:
        kept = {name for _, names in grouped(parsed(target["expr"])) for name in names} | SCRAPED
        for label in promql_labels(target["legendFormat"]):
            assert label in kept, target


def promql_labels(legend: str) -> list[str]:
    return [part.partition("}}")[0] for part in legend.split("{{")[1:]]


def test_unknown_metric_name_is_detected(series: dict[str, Labels]):
    for query in (
        "sum(inlay:no_such_metric)",
        'inlay:requests_total{colour="red"}',
        "sum by (colour) (inlay:requests_total)",
    ):
        with pytest.raises(AssertionError):
            test_query_uses_only_existing_metrics_and_labels(query, series)


def test_panels_do_not_overlap_and_have_unique_ids():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
