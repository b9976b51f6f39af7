"""A coordinator and its shards as real processes: killed, stopped, drained, adopted, and with its records lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.coordinator_process import WAIT_S, CoordinatorProcess, alive, ask, cluster, until

NAMES = ("shard-0", "shard-1", "shard-2")


@pytest.fixture
def one(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with cluster(tmp_path) as running:
        yield running


def register(one: CoordinatorProcess, worker: str, *, through: str = "shard-0") -> dict[str, Any]:
    status, reply = ask(one.shard(through)["http"], "POST", "/v1/workers/register", {"worker": worker})
    assert status == 200, reply
    return dict(reply)


def workers(one: CoordinatorProcess, name: str) -> set[str]:
    status, reply = ask(one.shard(name)["http"], "GET", "/v1/workers")
    assert status == 200, reply
    return {worker["worker"] for worker in reply["workers"]}


def test_a_cluster_comes_up_and_a_change_reaches_every_shard(one: CoordinatorProcess) -> None:
    slots = one.get("/v1/slots")
    assert (slots["epoch"], slots["shards"]) == (1, list(NAMES))
    assert sorted(one.shard(name)["slots"] for name in NAMES) == [1365, 1365, 1366]
    assert register(one, "w")["state"] == "live"
    assert [workers(one, name) for name in NAMES] == [{"w"}] * 3
    assert "serving for" in one.get("/")
    assert 'sarp_coordinator_shard_state{shard="shard-0",state="serving"} 1' in one.get("/metrics")


def test_a_killed_shard_serves_again_and_learns_what_it_missed(one: CoordinatorProcess) -> None:
    before, pid = one.shard(), one.pid()
    os.kill(pid, signal.SIGKILL)
    register(one, "while it was away", through="shard-1")
    after = one.wait_state("serving", not_incarnation=before["incarnation"])
    assert after["slots"] == before["slots"]
    until(lambda: workers(one, "shard-0") == {"while it was away"}, "shard-0 to know the worker")
    assert one.pid() != pid
    assert one.get("/v1/slots")["epoch"] == 1


def test_a_stopped_shard_is_ended_and_started_again(one: CoordinatorProcess) -> None:
    before, pid = one.shard(), one.pid()
    os.kill(pid, signal.SIGSTOP)
    one.wait_state("serving", not_incarnation=before["incarnation"])
    assert not alive(pid)
    kinds = one.kinds()
    story = [kind for kind in kinds if kind in ("shard_suspect", "shard_down", "shard_killed", "shard_restarted")]
    assert story[-4:] == ["shard_suspect", "shard_down", "shard_killed", "shard_restarted"]


def test_shards_outlive_a_killed_coordinator_and_its_successor_adopts_them(one: CoordinatorProcess) -> None:
    register(one, "before")
    pids, epoch, nonce = [one.pid(name) for name in NAMES], one.get("/v1/slots")["epoch"], one.get("/v1/slots")["nonce"]
    http = one.shard()["http"]
    one.end(signal.SIGKILL)
    assert ask(http, "GET", "/readyz")[0] == 200  # it goes on
    status, reply = ask(http, "POST", "/v1/workers/register", {"worker": "nobody numbers it"})
    assert (status, reply["error"]["code"]) == (503, "unavailable")
    os.kill(pids[2], signal.SIGKILL)  # and one ends while nobody looks
    one.start()
    one.wait_serving()
    assert [one.pid(name) for name in NAMES[:2]] == pids[:2]
    assert one.pid("shard-2") != pids[2]
    assert (one.get("/v1/slots")["epoch"], one.get("/v1/slots")["nonce"]) == (epoch, nonce)
    register(one, "behind")
    assert one.get("/v1/cluster")["number"] == 2
    assert [workers(one, name) for name in NAMES] == [{"before", "behind"}] * 3
    os.kill(pids[0], signal.SIGKILL)  # the end of one that is no child of ours is seen, too
    until(lambda: one.pid() != pids[0], "shard-0 to be started again")


def test_a_second_coordinator_is_refused(one: CoordinatorProcess) -> None:
    command = [part if part != str(one.stream_port) else "0" for part in one.command()]
    second = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)  # noqa: S603
    assert second.returncode == 2
    assert "another process has it" in second.stderr


def test_a_drained_shard_ends_in_order_and_stays_away_until_it_is_recovered(one: CoordinatorProcess) -> None:
    pid = one.pid()
    assert one.post("/v1/shards/shard-0/drain")[0] == 200
    one.wait_state("down")
    until(lambda: "shard_drained" in one.kinds(), "the end to be told")
    assert not alive(pid)
    one.end()
    one.start()  # the next coordinator does not start it, either
    one.wait_state("serving", name="shard-1")
    assert one.wait_state("down", "suspect", "joining")["state"] != "serving"
    assert one.pid() == pid
    until(lambda: one.shard()["state"] == "down", "shard-0 to be down")
    assert one.post("/v1/shards/shard-0/recover")[0] == 200
    one.wait_state("serving")


def test_lost_records_are_taken_over_from_the_shards(one: CoordinatorProcess) -> None:
    register(one, "w")
    before = one.get("/v1/slots")
    one.end(signal.SIGKILL)
    (one.directory / "coordinator" / "records").unlink()
    one.start()
    one.wait_serving()
    until(lambda: one.get("/v1/slots")["number"] == 1, "the change to be taken over")
    after = one.get("/v1/slots")
    assert (after["epoch"], after["nonce"], after["owners"]) == (before["epoch"], before["nonce"], before["owners"])
    register(one, "x")
    assert one.get("/v1/cluster")["number"] == 2
    assert workers(one, "shard-2") == {"w", "x"}


@pytest.mark.parametrize("identity", ["its own", "the original's"])
def test_a_copied_directory_is_no_second_owner(one: CoordinatorProcess, identity: str) -> None:
    copy = one.directory / "copy"
    shutil.copytree(one.directory / "coordinator" / "shards" / "shard-0", copy)
    if identity == "its own":
        (copy / "identity").unlink()
    command = [
        *(sys.executable, "-m", "shard", "--name", "shard-0", "--directory", str(copy)),
        *("--cluster-secret", str(one.secret), "--coordinator", f"127.0.0.1:{one.stream_port}"),
        *("--http-port", "0", "--stream-port", "0"),
    ]
    before = one.shard()
    with (one.directory / "copy.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)  # noqa: S603
    try:
        until(lambda: "identity_clash" in one.kinds(), "the clash to be told")
        after = one.shard()
        if identity == "its own":
            assert (after["incarnation"], after["stream"]) == (before["incarnation"], before["stream"])
            assert after["state"] == "serving"
        else:  # which is the copy nobody can tell
            until(lambda: one.shard()["lease_left_s"] < 57, "the lease to run out")
    finally:
        process.kill()
        process.wait()


def test_operators_are_told_what_they_cannot_have(one: CoordinatorProcess) -> None:
    for path, code in (
        ("/v1/shards/shard-9/drain", "bad_request"),
        ("/v1/shards/shard-0/recover", "bad_request"),
        ("/v1/shards/shard-0/nothing", "not_found"),
    ):
        status, reply = one.post(path)
        assert reply["error"]["code"] == code
        assert status in (400, 404)
    assert one.post("/v1/shards/shard-0/snapshot")[0] == 200
    until(lambda: "snapshot_taken" in one.kinds(), "the snapshot to be told")
