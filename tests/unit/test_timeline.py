"""The timeline: numbered events, the newest kept, in a file too, whatever happened to the file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from sarp_cluster import limits
from sarp_cluster.observe.timeline import Timeline
from sarp_cluster.types import Event

KEPT = 10


@pytest.fixture
def ticks() -> Iterator[float]:
    return (1_000.0 + second for second in count())


async def opened(path: Path | None, ticks: Iterator[float], kept: int = KEPT) -> Timeline:
    return await Timeline.open(path, wall_clock=lambda: next(ticks), kept=kept)


def files(directory: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(directory.iterdir())}


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events]


async def test_events_are_numbered_and_told_from_a_number_on(ticks: Iterator[float]) -> None:
    timeline = await opened(None, ticks)
    assert (timeline.last, timeline.after(0, 5)) == (0, [])
    first = timeline.note("s0", "shard_down", "silent")
    assert first == Event(number=1, time=1_000.0, node="s0", kind="shard_down", text="silent")
    for number in range(2, 6):
        timeline.note("", "k", str(number))
    assert texts(timeline.after(0, 100)) == ["silent", "2", "3", "4", "5"]
    assert texts(timeline.after(3, 1)) == ["4"]
    assert timeline.after(5, 10) == []
    assert timeline.after(99, 10) == []
    await timeline.flush()


async def test_only_the_newest_are_kept(ticks: Iterator[float]) -> None:
    timeline = await opened(None, ticks)
    for number in range(1, 26):
        timeline.note("", "k", str(number))
    assert [event.number for event in timeline.after(0, 100)] == list(range(16, 26))
    assert [event.number for event in timeline.after(20, 2)] == [21, 22]


async def test_a_long_text_is_cut_off(ticks: Iterator[float]) -> None:
    timeline = await opened(None, ticks)
    assert len(timeline.note("", "k", "x" * 10_000).text) == limits.EVENT_TEXT_MAX


async def test_the_next_coordinator_goes_on_where_the_last_one_ended(tmp_path: Path, ticks: Iterator[float]) -> None:
    path = tmp_path / "timeline.ndjson"
    wanted: list[str] = []
    for restart in range(8):
        timeline = await opened(path, ticks)
        assert texts(timeline.after(0, 100)) == wanted[-KEPT:]
        assert timeline.last == len(wanted)
        for number in range(3 + restart % 2):
            wanted.append(f"{restart}.{number} ü\n")
            timeline.note("s0", "k", wanted[-1])
        await timeline.close()
    found = files(tmp_path)
    assert list(found) == ["timeline.ndjson", "timeline.ndjson.1"]
    assert all(len(text.splitlines()) <= KEPT + 4 for text in found.values())


async def test_events_are_written_as_they_come_one_json_object_a_line(tmp_path: Path, ticks: Iterator[float]) -> None:
    path = tmp_path / "timeline.ndjson"
    timeline = await opened(path, ticks)
    running = asyncio.create_task(timeline.run())
    timeline.note("s0", "shard_joined", "here")
    async with asyncio.timeout(20):
        while not any((await asyncio.to_thread(files, tmp_path)).values()):
            await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await timeline.close()
    (line,) = path.read_text().splitlines()
    assert json.loads(line) == {"number": 1, "time": 1_000.0, "node": "s0", "kind": "shard_joined", "text": "here"}


@pytest.mark.parametrize("damage", [b'{"number": 3, "ti', b"\xff\xfe nothing of ours", b"{}\n[]\n\n"])
async def test_what_cannot_be_read_is_passed_over(tmp_path: Path, ticks: Iterator[float], damage: bytes) -> None:
    path = tmp_path / "timeline.ndjson"
    timeline = await opened(path, ticks)
    timeline.note("", "k", "before")
    await timeline.close()
    path.write_bytes(path.read_bytes() + damage)
    timeline = await opened(path, ticks)
    timeline.note("", "k", "behind")
    await timeline.close()
    timeline = await opened(path, ticks)
    assert texts(timeline.after(0, 10)) == ["before", "behind"]


async def test_a_disk_that_fails_costs_lines_and_heals(tmp_path: Path, ticks: Iterator[float]) -> None:
    path = tmp_path / "directory" / "timeline.ndjson"
    timeline = await opened(path, ticks)
    timeline.note("", "k", "while it fails")
    await timeline.flush()
    assert timeline.failed == 1
    assert texts(timeline.after(0, 10)) == ["while it fails"]
    path.parent.mkdir()
    timeline.note("", "k", "afterwards")
    await timeline.close()
    assert texts((await opened(path, ticks)).after(0, 10)) == ["while it fails", "afterwards"]


async def test_events_at_once_lose_none(tmp_path: Path, ticks: Iterator[float]) -> None:
    path = tmp_path / "timeline.ndjson"
    timeline = await opened(path, ticks, kept=1_000)

    async def some(name: str) -> None:
        for number in range(20):
            timeline.note(name, "k", str(number))
            await timeline.flush()

    await asyncio.gather(*(some(str(task)) for task in range(10)))
    await timeline.close()
    again = await opened(path, ticks, kept=1_000)
    assert [event.number for event in again.after(0, 1_000)] == list(range(1, 201))


async def test_a_writer_that_is_cancelled_leaves_no_file_open_and_writes_no_line_twice(
    tmp_path: Path, ticks: Iterator[float]
) -> None:
    path = tmp_path / "timeline.ndjson"
    timeline = await opened(path, ticks, kept=1_000)
    for number in range(100):
        running = asyncio.create_task(timeline.run())
        timeline.note("", "k", str(number))
        for _ in range(number % 10):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await timeline.close()
    assert [json.loads(line)["number"] for line in files(tmp_path)[path.name].splitlines()] == list(range(1, 101))
