"""Metrics in Prometheus's text format. Counters are plain integers where they are counted; they are read when asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """One number that a node tells of itself."""

    name: str
    """With its unit; counters end in `_total`."""
    kind: Literal["counter", "gauge"]
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def render(metrics: Iterable[Metric]) -> str:
    """The text. Metrics of one name have to follow one another."""
    lines: list[str] = []
    last = ""
    for metric in metrics:
        if metric.name != last:
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            last = metric.name
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in metric.labels)
        lines.append(f"{metric.name}{{{labels}}} {metric.value}" if labels else f"{metric.name} {metric.value}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
