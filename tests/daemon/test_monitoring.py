"""The Grafana dashboard and the alert rules use PromQL that parses, and metrics and labels that shardfs has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import promql_parser
import pytest
import yaml

from shardfs.daemon import mount_statistics
from shardfs.storage.counters import Histogram
from tests.datasets import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

MONITORING = ROOT / "docs/monitoring"
FILES = ("grafana-dashboard.json", "alerts.yml")


def snapshot() -> dict[str, Any]:
    """Of a writable mount of a remote source in which everything has happened."""
    figures: dict[str, Any] = defaultdict(int, requests={"read": 1}, errors={"read": {"EIO": 1}}, caches={"index": {}})
    figures["caches"]["index"] = defaultdict(int)
    figures["store"] = defaultdict(int, requests={"read": 1}, errors={"EIO": 1}, bins=Histogram().bins)
    figures["writing"] = defaultdict(int)
    return figures


def exposed() -> dict[str, set[str]]:
    """Metric -> its labels."""
    times = Histogram()
    times.add(1.0)
    metrics: dict[str, set[str]] = {"up": {"job"}}
    for line in mount_statistics._metrics(snapshot(), {15: times}):
        if not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? .*", line, re.DOTALL).groups()  # type: ignore[union-attr]
            metrics.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    return metrics


def dashboard() -> Any:
    return json.loads((MONITORING / "grafana-dashboard.json").read_text())


def rules() -> Iterator[Any]:
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]:
        yield from group["rules"]


def expressions(file: str) -> list[str]:
    if file == "alerts.yml":
        return [rule["expr"] for rule in rules()]
    texts = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [text.replace("$__rate_interval", "5m").replace("$instance", ".*") for text in texts]


def selectors(text: str) -> list[Any]:
    nodes: list[Any] = []
    promql_parser.walk(promql_parser.parse(text), nodes.append)
    return [e for e in nodes if isinstance(e, promql_parser.VectorSelector)]


@pytest.mark.parametrize("file", FILES)
def test_every_metric_and_label_exists(file: str) -> None:
    metrics = exposed()
    vector_selectors = [selector for text in expressions(file) for selector in selectors(text)]
    assert len(vector_selectors) > 5
    for selector in vector_selectors:
        assert selector.name in metrics
        assert {m.name for m in selector.matchers.matchers} <= metrics[selector.name] | {"instance", "job"}


def test_alerts_name_a_fix() -> None:
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "fix"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in dashboard()["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
