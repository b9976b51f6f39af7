"""The example does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.client import main
from tests.local_cluster import local_cluster

LINES_MAX = 20


async def test_the_example_finds_what_it_inserted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with local_cluster(tmp_path) as cluster:
        await main(cluster.url)
    assert capsys.readouterr().out == "before: 0 tokens\nafter: 992 tokens, held by ['gpu-node-1']\n"


def test_the_example_is_as_short_as_it_says() -> None:
    lines = (Path(__file__).parents[2] / "examples" / "client.py").read_text().splitlines()
    assert sum(1 for line in lines if line.strip()) <= LINES_MAX
