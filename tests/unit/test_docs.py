"""The documents say what the code does."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sarp_cluster.cli import build_parser
from sarp_cluster.config import IndexConfig
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from shard.index import Index
from shard.namespaces import IndexNamespace

ROOT: Final = Path(__file__).parents[2]
CONFIGURATION: Final = (ROOT / "docs" / "configuration.md").read_text()
DECISIONS: Final = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def rows(text: str, first_column: str) -> Iterator[list[str]]:
    """The rows of the table whose first column has this heading, without the heading."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            next(lines)
            break
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


class TestConfiguration:
    def test_every_setting_is_described_with_its_type_and_default(self) -> None:
        described = [
            (name.strip("`"), kind.strip("`"), default.strip("`"))
            for name, kind, _, default, _, _ in rows(CONFIGURATION, "name")
        ]
        fields = [(field.name, field.type, field.default) for field in dataclasses.fields(IndexConfig)]
        assert [(name, kind) for name, kind, _ in described] == [(name, kind) for name, kind, _ in fields]
        assert [default.replace("_", "") for _, _, default in described] == [
            f'"{default}"' if isinstance(default, str) else str(default) for _, _, default in fields
        ]

    def test_every_setting_says_what_it_means_and_when_to_change_it(self) -> None:
        assert all(all(row[4:]) for row in rows(CONFIGURATION, "name"))

    def test_every_option_of_replay_is_described(self) -> None:
        (commands,) = (one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction))
        options = {option for action in commands.choices["replay"]._actions for option in action.option_strings} - {
            "-h",
            "--help",
        }
        described = {
            option for row in rows(CONFIGURATION, "option") for option in re.findall(r"(?<!\w)--?[\w-]+", row[0])
        }
        assert described == options


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    for path in DECISIONS:
        assert path.read_text().startswith(f"# {path.name[:4]} ")


def test_the_readme_names_commands_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert (
        {"demo", "test"}
        <= set(re.findall(r"^make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
        <= targets
    )


# --- the example over time of docs/architecture.md --------------------------------------------------------------------

A: Final = [f"a{i}" for i in range(12)]
B: Final = [*A[:5], "b5", "b6", "b7", "b8", "b9"]
C: Final = [*A[:6], "c6", "c7"]
W: Final = Worker("w")
V: Final = Worker("v")
BEING_BUILT, PUBLISHED = 1, 2
HEADERS_END: Final = 4096


def chained(names: list[str]) -> bytes:
    ids, previous = b"", b""
    for name in names:
        previous = hashlib.blake2b(previous + name.encode(), digest_size=8).digest()
        ids += previous
    return ids


class Example:
    """An index whose lists can be written as in the document."""

    def __init__(self, index: Index, namespace: IndexNamespace) -> None:
        self.index = index
        self.namespace = namespace
        self._names: dict[int, str] = {}
        for sequence in (A, B, C):
            internal = memoryview(namespace.key.internal_ids(chained(sequence))).cast("Q")
            self._names |= {block_id >> 16: name for block_id, name in zip(internal, sequence, strict=True)}

    def lists(self) -> dict[str, str]:
        """Routing key -> numbers of the segments in its list."""
        found: dict[str, set[int]] = {}
        for key, _, _, slot in self.index.state.directory.postings():
            if slot >= HEADERS_END:
                found.setdefault(self._names[key >> 16], set()).add(slot - HEADERS_END + 1)
        return {key: " ".join(f"#{number}" for number in sorted(numbers)) for key, numbers in found.items()}

    def states(self) -> dict[str, tuple[int, int]]:
        """Routing key -> states of the next base point and of the midpoint."""
        return {
            self._names[key >> 16]: (slot & 3, (slot >> 2) & 3)
            for key, _, _, slot in self.index.state.directory.postings()
            if slot < HEADERS_END
        }

    def segment(self, number: int) -> dict[str, int]:
        row = self.index.state.table.describe(HEADERS_END + number - 1)
        assert row is not None
        named = {name: row[name] and row[name] - HEADERS_END + 1 for name in ("parent", "origin")}
        return {"window": row["window"], "fork": row["fork"], "count": row["count"], **named}

    async def insert(self, names: list[str], worker: Worker, first: int) -> None:
        await self.index.insert(self.namespace, chained(names), worker=worker, first=first)


async def test_the_example_over_time_is_what_happens(tmp_path: Path) -> None:
    config = IndexConfig(segment_blocks=8, base_points=2, pruning_threshold=1, refinement_threshold=2)
    index = await Index.open(tmp_path / "store", config)
    namespace = index.create_namespace(NamespaceSpec(model="example", hash_profile=HashProfile.OPAQUE))
    one = Example(index, namespace)

    await one.insert(A[:10], W, 0)
    assert one.lists() == {"a0": "#1", "a8": "#2"}
    assert one.segment(2) == {"window": 1, "fork": 0, "count": 2, "parent": 1, "origin": 0}
    before = [posting for posting in index.state.directory.postings() if posting[3] == HEADERS_END + 1]

    await one.insert(A, W, 10)
    assert one.lists() == {"a0": "#1", "a8": "#2"}
    assert one.segment(2)["count"] == 4
    assert [posting for posting in index.state.directory.postings() if posting[3] == HEADERS_END + 1] > before

    await one.insert(B, V, 5)  # the back-fill is due, and has not run: nothing was awaited that it could have run in
    assert one.lists() == {"a0": "#1 #3", "a4": "#3", "a8": "#2", "b8": "#4"}
    assert one.states() == {"a0": (BEING_BUILT, 0)}
    assert one.segment(3) == {"window": 0, "fork": 5, "count": 8, "parent": 0, "origin": 1}
    assert one.segment(4) == {"window": 1, "fork": 0, "count": 2, "parent": 3, "origin": 0}
    await index.drain_backfill()
    assert one.lists() == {"a0": "#1 #3", "a4": "#1 #3", "a8": "#2", "b8": "#4"}
    assert one.states() == {"a0": (PUBLISHED, 0)}

    answer = await index.match(namespace, chained(B))
    assert (answer.matched_blocks, answer.reads, answer.waves) == (10, 3, 1)
    assert [(worker.instance_id, worker.gpu) for worker in answer.workers] == [("w", 5)]
    answer = await index.match(namespace, chained(C))
    assert (answer.matched_blocks, answer.reads, answer.waves) == (6, 1, 1)

    await one.insert(C, W, 6)
    await index.drain_backfill()
    assert one.segment(5) == {"window": 0, "fork": 6, "count": 8, "parent": 0, "origin": 1}
    assert one.lists() == {
        "a0": "#1 #3 #5",
        "a2": "#1 #3 #5",
        "a4": "#1 #3 #5",
        "a6": "#1",
        "b6": "#3",
        "c6": "#5",
        "a8": "#2",
        "b8": "#4",
    }
    assert one.states() == {"a0": (PUBLISHED, PUBLISHED), "a4": (0, PUBLISHED)}
    assert index.count_candidates(namespace, chained(A[:7])).raw == 1
    await index.validate()
    await index.close()
