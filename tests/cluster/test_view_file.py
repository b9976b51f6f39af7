"""View files: a node finds what it was last told of the cluster, or learns that it cannot."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from sarp_cluster.cluster.registry import Registry
from sarp_cluster.cluster.view import ClusterView
from sarp_cluster.cluster.view_file import ViewContent, load_view, save_view
from sarp_cluster.errors import MembershipError
from sarp_cluster.storage.record_file import RecordFile
from tests.golden.record_files import ENTRIES, NUMBER, SLOT_MAP, VIEW, Memory


async def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    file = await RecordFile.open(tmp_path / "view")
    assert await load_view(file) is None
    await save_view(file, VIEW)
    await file.close()
    file = await RecordFile.open(tmp_path / "view")
    loaded = await load_view(file)
    await file.close()
    assert loaded == VIEW
    assert loaded.unpacked_map() == SLOT_MAP
    registry = loaded.registry()
    assert (registry.number, registry.entries()) == (NUMBER, ENTRIES)


async def test_a_node_without_a_map_has_a_view_too() -> None:
    store = Memory()
    await save_view(store, ViewContent.of("c", None, Registry(), []))
    loaded = await load_view(store)
    assert loaded is not None
    assert loaded.unpacked_map() is None
    assert loaded.registry().number == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "version 2, this program reads 1"),
        ({"more": 1}, "unknown field"),
        ({"slot_map": {"version": 1}}, "missing required field"),
        ({"slot_map": msgspec.to_builtins(SLOT_MAP.packed(), builtin_types=(bytes,)) | {"nonce": b""}}, "nonce"),
    ],
)
async def test_a_view_that_makes_no_sense_is_refused(change: dict[str, object], why: str) -> None:
    content = msgspec.to_builtins(VIEW, builtin_types=(bytes,)) | change
    with pytest.raises(MembershipError, match=why):
        await load_view(Memory(msgspec.msgpack.encode(content)))
    with pytest.raises(MembershipError, match="cannot be read"):
        await load_view(Memory(b"\xc1"))


async def test_a_view_that_cannot_be_saved_says_so() -> None:
    class Full(Memory):
        async def write(self, content: bytes) -> None:
            raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(MembershipError, match="no space"):
        await save_view(Full(), VIEW)


def test_a_view_keeps_the_number_of_a_registry_without_entries() -> None:
    assert ClusterView(registry=Registry([], 7)).number == 7
