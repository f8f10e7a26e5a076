"""The table of figures makes all that shows the status of a mount: a new figure is a line of it."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Any

import pytest

from shardfs.cli import status as status_verb
from shardfs.daemon import mount_statistics, status_fields, status_server
from shardfs.daemon.asking import Mount, MountState
from shardfs.daemon.mount_status import parse_status
from shardfs.daemon.status_fields import FIGURES, Cell, Figure, Kind
from shardfs.storage.counters import BOUNDS_S

CACHES = ("index", "chunk")

IN_NO_LINE = {"started", "cpu", "threads", "resident_bytes", "published_chunks", "orphans", "failing", "refused"}
"""Shown by the first lines of a mount, or by the paths of files; or in no text."""


def snapshot() -> dict[str, Any]:
    """A status in which each figure has a value of its own."""
    numbers = count(1001)
    latency = {"count": 1, "mean": 0.1, "median_below": None, "p99_below": 0.5}
    groups: dict[str, dict[str, Any]] = {
        "": {"pid": 1, "layout": "native", "uptime": 2, "errors": {}, "latencies": {}},
        "caches": {},
        "store": {"latency": latency, "bins": [0] * (len(BOUNDS_S) + 1), "seconds": 0.0},
        "writing": {"journal": "/j", "errors": {}, "refused_paths": {}, "orphan_paths": [], "problems": []},
    }
    for figure in status_fields.FIGURES:
        number = next(numbers)
        value: Any = {"x": number} if figure.label else f"because {number}" if figure.kind is Kind.FLAG else number
        groups[figure.group][figure.name] = value
    caches = {name: groups["caches"] for name in CACHES}
    return {**groups[""], "caches": caches, "store": groups["store"], "writing": groups["writing"]}


def value_of(figure: Figure, values: dict[str, Any]) -> Any:
    return next(iter(status_fields.groups(figure, values).values()))[figure.name]


def text_of(values: dict[str, Any]) -> str:
    return "\n".join(status_verb._lines(Mount("/mnt", "x", MountState.ANSWERS, values)))


def on_the_page() -> list[dict[str, Any]]:
    match = re.search(r"FIGURES = (\[.*\]);", status_server._page().decode())
    assert match is not None
    page_figures: list[dict[str, Any]] = json.loads(match[1])
    return page_figures


def test_json_with_something_else_for_the_figure_is_no_status() -> None:
    sound = snapshot()
    assert parse_status(json.dumps(sound).encode()) == sound
    strange: tuple[Any, ...] = ([], {"x": "y"})
    for figure in FIGURES:
        for other in strange:
            document = json.loads(json.dumps(sound))
            for group in status_fields.groups(figure, document).values():
                group[figure.name] = other
            assert parse_status(json.dumps(document).encode()) is None


def test_the_figure_is_zero_in_the_status_of_a_version_without_it() -> None:
    for figure in FIGURES:
        document = snapshot()
        for group in status_fields.groups(figure, document).values():
            group.pop(figure.name, None)  # the caches of `snapshot` are one dictionary
        completed = parse_status(json.dumps(document).encode())
        assert completed is not None
        assert not value_of(figure, completed)
        assert text_of(completed)
        assert list(status_fields.metrics(completed))


def test_the_metric() -> None:
    for figure in FIGURES:
        values = snapshot()
        lines = list(mount_statistics._metrics(values, {}))
        name = f"shardfs_{figure.metric_name}"
        assert f"# HELP {name} {figure.help}" in lines
        assert f"# TYPE {name} {'counter' if figure.kind is Kind.COUNTER else 'gauge'}" in lines
        samples = [line for line in lines if re.match(rf"{name}[ {{]", line)]
        value = value_of(figure, values)
        wanted = value["x"] if figure.label else 1 if figure.kind is Kind.FLAG else value
        assert len(samples) == (len(CACHES) if figure.group == "caches" else 1)
        assert all(sample.endswith(f" {wanted}") for sample in samples)
        assert not figure.label or f'{figure.label}="x"' in samples[0]


def test_the_text() -> None:
    """A line shows the figure by its value, or by a share or a quotient."""
    for figure in FIGURES:
        lines = [other.line for other in FIGURES if other.group == figure.group and other.line]
        in_a_share = any(re.search(rf"\{{(\w+/{figure.name}|{figure.name}/\w+)\}}", line) for line in lines)
        named = figure.line is None or figure.kind is Kind.FLAG or any(f"{{{figure.name}}}" in line for line in lines)
        assert named or in_a_share or figure.name in IN_NO_LINE
        if named and figure.name != "silent":
            values = snapshot()
            assert figure.text(value_of(figure, values)) in text_of(values)


def test_rates_shares_and_values_on_the_page() -> None:
    page = on_the_page()
    for figure in FIGURES:
        for cell in figure.cells:
            assert {"group": figure.group, "name": figure.name, "how": cell.how}.items() <= next(
                entry for entry in page if entry["title"] == cell.title
            ).items()


@pytest.mark.parametrize("group", ["", "caches", "store", "writing"])
def test_a_new_figure_is_one_line(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new = Figure(
        group, "sparks_seen", Kind.COUNTER, "spark", "Sparks that the mount has seen.", cells=(Cell("sparks"),)
    )
    monkeypatch.setattr(status_fields, "FIGURES", (*FIGURES, new))
    values = snapshot()
    number = value_of(new, values)
    assert parse_status(json.dumps(values).encode()) == values
    assert f"  sparks seen: {number} sparks" in text_of(values)
    assert f"# HELP shardfs_{new.metric_name} Sparks that the mount has seen." in list(
        mount_statistics._metrics(values, {})
    )
    assert "sparks" in [cell["title"] for cell in on_the_page()]
