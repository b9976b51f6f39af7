"""The commands that talk to a cluster, each as a user calls it: `sarp match`, `sarp status`, `sarp replay --url` …"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sarp_cluster.cli import build_parser, main
from sarp_cluster.cli.cluster import status_command
from sarp_cluster.cli.connection import client_of
from sarp_cluster.client import AsyncClient
from sarp_cluster.types import Worker
from sarp_cluster.wire.auth import digest, read_credentials
from tests.local_cluster import LocalCluster, credential, local_cluster, token_of

SAMPLE = Path(__file__).parents[2] / "examples" / "sample"
Sarp = Callable[..., Awaitable[str]]


@pytest.fixture
def sarp(capsys: pytest.CaptureFixture[str]) -> Sarp:
    """Runs a command beside the cluster, in a thread of its own, as a process would; returns what it printed."""

    async def run(*words: object, status: int = 0) -> str:
        found = await asyncio.to_thread(main, [str(word) for word in words])
        printed = capsys.readouterr()
        assert found == status, printed.err
        return printed.err if status else printed.out

    return run


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SARP_URL", raising=False)
    monkeypatch.delenv("SARP_CREDENTIAL", raising=False)


async def test_people_insert_match_and_remove(tmp_path: Path, sarp: Sarp, monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_cluster(tmp_path) as cluster:
        common = ("--url", cluster.url, "--model", "llama", "--block-size", 4)
        out = await sarp("insert", *common, "--worker", "gpu-1:3", "--register", *range(10))
        assert out == "inserted; 2 blocks were new\n"
        out = await sarp("match", *common, *range(9))
        assert out.splitlines() == [
            "2 of 2 blocks, 8 tokens",
            "worker  rank  gpu  cpu  ssd  remote",
            "gpu-1      3    2    2    2       2",
        ]
        monkeypatch.setenv("SARP_URL", cluster.urls("sarp"))
        monkeypatch.setattr("sys.stdin", io.StringIO("[0, 1, 2, 3, 0x4]"))
        reply = json.loads(await sarp("match", *common[2:], "--direct", "--json", "--file", "-"))
        assert (reply["matched_blocks"], reply["workers"][0]["worker"]) == (1, "gpu-1")
        file = tmp_path / "ids"
        file.write_text("0,1 2\n3 4 5 6 7")
        removed = ("remove", *common, "--worker", "gpu-1:3", "--file", file, "--first", 1, "--json")
        assert json.loads(await sarp(*removed))["segments_changed"] == 1
        out = await sarp("match", *common, "--detail", "blocks", *range(8))
        assert out.splitlines()[0] == "1 of 2 blocks, 4 tokens"
        assert out.splitlines()[-1] == "     0  gpu-1:3 gpu"
        opaque = ("--url", cluster.url, "--model", "llama", "--hash-profile", "opaque", "--ids")
        await sarp("insert", *opaque, "--worker", "gpu-1:3", hex(2**64 - 1), 7)
        assert (await sarp("match", *opaque, 2**64 - 1)).startswith("1 of 1 blocks")


async def test_what_a_command_is_refused_is_told_in_one_line(tmp_path: Path, sarp: Sarp) -> None:
    async with local_cluster(tmp_path) as cluster:
        common = ("--url", cluster.url, "--model", "llama")
        error = await sarp("insert", *common, "--worker", "nobody", *range(16), status=2)
        assert error.startswith("sarp: error: unknown_worker: ")
        assert error.count("\n") == 1
        assert "numbers" in await sarp("match", *common, "x", status=2)
        assert "--file" in await sarp("match", *common, "1", "--file", "-", status=2)
        assert "url" in await sarp("match", "--url", "nowhere", "--model", "m", status=2)
        assert "cannot connect" in await sarp("status", "--once", "--url", "sarp://127.0.0.1:1", status=2)


async def test_a_token_comes_from_a_file_that_others_cannot_read_or_from_the_environment(
    tmp_path: Path, sarp: Sarp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_cluster(tmp_path, credentials=[credential("me", "match", "insert")]) as cluster:
        common = ("match", "--url", cluster.url, "--model", "llama", "1")
        assert "unauthenticated" in await sarp(*common, status=2)
        file = tmp_path / "token"
        file.write_text(token_of("me") + "\n")
        file.chmod(0o644)
        assert "chmod 600" in await sarp(*common, "--credential-file", file, status=2)
        file.chmod(0o600)
        assert (await sarp(*common, "--credential-file", file)).startswith("0 of 0 blocks")
        monkeypatch.setenv("SARP_CREDENTIAL", token_of("me"))
        assert (await sarp(*common)).startswith("0 of 0 blocks")


async def test_status_shows_shards_routers_and_events(tmp_path: Path, sarp: Sarp) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1")) as cluster:
        out = await sarp("status", "--url", cluster.url)
        lines = out.splitlines()
        assert lines[0].startswith("cluster cluster-for-tests   coordinator leads   slot map 1")
        assert [line.split()[:3] for line in lines[3:5]] == [["s0", "serving", "2,048"], ["s1", "serving", "2,048"]]
        assert any(line.startswith("router-0 ") for line in lines)
        assert lines[-1].endswith("event 5")
        assert json.loads(await sarp("status", "--json", "--url", cluster.url))["epoch"] == 1
        out = await sarp("events", "--url", cluster.url, "--after", 3)
        assert [line.split()[0] for line in out.splitlines()] == ["4", "5"]
        out = await sarp("events", "--url", cluster.url, "--json")
        assert [json.loads(line)["number"] for line in out.splitlines()] == [1, 2, 3, 4, 5]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_a_live_status_goes_on_when_the_cluster_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_cluster(tmp_path) as cluster:
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        real, calls = AsyncClient.cluster, 0

        async def sometimes(client: AsyncClient) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                async with AsyncClient("http://127.0.0.1:1") as nobody:
                    return await real(nobody)
            if calls == 4:
                raise KeyboardInterrupt
            return await real(client)

        monkeypatch.setattr(AsyncClient, "cluster", sometimes)
        words = ["status", "--url", cluster.url, "--interval", "0"]
        arguments = await asyncio.to_thread(lambda: build_parser().parse_args(words))
        with pytest.raises(KeyboardInterrupt):
            await status_command(arguments, client_of(arguments))
        first, second, third = terminal.getvalue().split("\x1b[H\x1b[J")[1:]
        assert "connection_lost" in second
        assert first == third
        assert first.count("event 5") == 1


async def test_shards_are_told_to_take_snapshots_and_to_drain(tmp_path: Path, sarp: Sarp) -> None:
    async with local_cluster(tmp_path) as cluster:
        assert await sarp("snapshot", "s0", "--url", cluster.url) == "s0: the snapshot is taken\n"
        assert await sarp("drain", "s1", "--url", cluster.url) == "s1: drained\n"
        assert cluster.coordinator.commands == ["s0", "s1"]


def test_a_credential_is_printed_once_and_kept_as_a_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["credential", "gateway", "--scope", "match", "--scope", "insert", "--tenant", "a", "--tenant", "b"]) == 0
    )
    token, entry = (line.partition(": ")[2] for line in capsys.readouterr().out.splitlines())
    made = read_credentials(f'{{"credentials": [{entry}]}}'.encode())[0]
    assert (made.name, made.sha256, made.tenants) == ("gateway", digest(token), ["a", "b"])
    assert made.scopes == ["match", "insert"]
    file = tmp_path / "credentials"
    for name in ("one", "two"):
        assert main(["credential", name, "--scope", "admin", "--append", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert "sarp_" not in file.read_text()
    assert [one.name for one in read_credentials(file.read_bytes())] == ["one", "two"]
    before = file.read_bytes()
    assert main(["credential", "two", "--scope", "admin", "--append", str(file)]) == 2
    file.chmod(0o640)
    assert main(["credential", "three", "--scope", "admin", "--append", str(file)]) == 2
    assert file.read_bytes() == before
    with pytest.raises(SystemExit):
        main(["credential", "node", "--scope", "node"])


@pytest.mark.parametrize("way", [(), ("--direct",)])
async def test_a_replay_drives_a_cluster(tmp_path: Path, sarp: Sarp, way: tuple[str, ...]) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1")) as cluster:
        trace = SAMPLE / "coding_agent_blocks.jsonl.gz"
        common = ("replay", trace, "--limit", 40, "--url", cluster.urls("sarp"), *way)
        first = json.loads(await sarp(*common, "--json"))
        assert first["requests"] == 40
        assert first["loss"] == 0
        assert first["hit_rate"] == first["exact_hit_rate"] > 0
        assert first["reads_mean"] is first["blocks"] is first["candidates"] is None
        assert (first["cluster"], first["incomplete"]) == (cluster.urls("sarp"), 0)
        # A second one finds nothing of the first, and several requests at once need no more.
        second = json.loads(await sarp(*common, "--json", "--in-flight", 8))
        assert second["requests"] == 40
        out = await sarp(*common)
        row = out.splitlines()[3].split()
        assert row[5:14] == ["-"] * 9
        assert "the shards' own" in out
        async with AsyncClient(cluster.url) as client:
            assert {one.state for one in await client.workers()} == {"gone"}


async def test_a_replay_counts_answers_that_were_cut_short(tmp_path: Path, sarp: Sarp) -> None:
    async with local_cluster(tmp_path, shards=("s0", "s1")) as cluster:
        real = cluster.routers[0].blocks.match

        async def cut(principal: Any, request: Any) -> Any:
            request.workers = []
            cut_short(cluster)
            return await real(principal, request)

        cluster.routers[0].handlers = {**cluster.routers[0].handlers, "match": cut}
        trace = SAMPLE / "coding_agent_blocks.jsonl.gz"
        out = await sarp("replay", trace, "--limit", 10, "--url", cluster.urls("sarp"))
        assert "answers were cut short" in out


def cut_short(cluster: LocalCluster) -> None:
    """The router knows no shard any more."""
    for link in cluster.routers[0].links.all():
        link._late, link._trial_at = 100, float("inf")


def test_services_are_imported_when_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for name, option in (
        ("shard", "--advertise"),
        ("router", "--coordinator"),
        ("coordinator", "--splits"),
        ("up", "--routers"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert option in capsys.readouterr().out


def test_a_worker_is_written_with_or_without_its_rank() -> None:
    parse = build_parser().parse_args
    common = ["insert", "--model", "m", "--worker"]
    assert parse([*common, "a"]).worker == Worker("a", 0)
    assert parse([*common, "a:b:7"]).worker == Worker("a:b", 7)
    for wrong in (":1", "a:x", "a:65536"):
        with pytest.raises(SystemExit):
            parse([*common, wrong])
