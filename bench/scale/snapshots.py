"""Snapshots of the baselines: what each would have saved of an index of so many replicas of a template.

Their formats are those that bench/baselines/recovery.cpp reads. Each is written as a careful program would save its own
structure: columns, lists whole and sorted, nothing that the reader would have to sort or look up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from bench.scale.template import FIRST_SLOT, Template, mask_of

ROW: Final = np.dtype(
    [
        ("image", "<u8"),
        ("delta", "<u8"),
        ("parent", "<u4"),
        ("origin", "<u4"),
        ("children", "<u4"),
        ("namespace", "<u4"),
        ("window", "<u2"),
        ("tag", "<u2"),
        ("fork", "u1"),
        ("count", "u1"),
        ("reserved", "<u2"),
    ]
)
BLOCK: Final = np.dtype([("id", "<u8"), ("holder", "<u8"), ("flags", "<u8")])
NODE_NONE: Final = 0
RECORD_BYTES: Final = 544
"""Where a segment's record would stand: places only have to be different."""

Column = NDArray[Any]
Write = Callable[[BinaryIO, Template, int], None]


def save(path: Path, write: Write, template: Template, replicas: int) -> int:
    """Write a snapshot and sync it. Returns its size in bytes."""
    with path.open("wb", buffering=1 << 20) as file:
        write(file, template, replicas)
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size


def write_query(path: Path, template: Template, replicas: int) -> None:
    """A sequence of the last replica: its length, the slot of its last segment, its internal IDs."""
    number = len(template.paths) // 2
    ids = template.internal_query(number, replicas - 1)
    last = int(template.path_slots[number]) + template.slots_of(replicas - 1)
    path.write_bytes(np.array([len(ids), last], dtype="<u8").tobytes() + ids.tobytes())


def _numbers(file: BinaryIO, *numbers: int) -> None:
    file.write(np.array(numbers, dtype="<u8").tobytes())


def _own(template: Template, replicas: int) -> Iterator[tuple[np.uint64, int]]:
    """(mask, slots to add) of each replica."""
    for replica in range(replicas):
        yield np.uint64(mask_of(replica)), template.slots_of(replica)


# --- routing directory and segment table ------------------------------------------------------------------------------


def write_directory(file: BinaryIO, template: Template, replicas: int) -> None:
    """Every posting list, sorted by filter, and every row of the segment table."""
    order = np.lexsort([template.entries[field] for field in ("slot", "low", "high", "key")])
    entries, masked = template.entries[order], template.entry_masked[order]
    common = _common_lists(entries[~masked], template, replicas)
    own = entries[masked]
    keys, counts = np.unique(own["key"], return_counts=True)
    common_keys, common_counts = np.unique(common["key"], return_counts=True)
    _numbers(
        file,
        len(common_keys) + replicas * len(keys),
        len(common) + replicas * len(own),
        template.segments_of(replicas),
    )
    file.write(common_keys.tobytes())
    for mask, _ in _own(template, replicas):
        file.write((keys ^ mask).tobytes())
    file.write(common_counts.astype("<u4").tobytes())
    for _ in range(replicas):
        file.write(counts.astype("<u4").tobytes())
    for field in ("high", "low"):
        file.write(common[field].tobytes())
        column = np.ascontiguousarray(own[field]).tobytes()
        for _ in range(replicas):
            file.write(column)
    file.write(common["slot"].tobytes())
    for _, slots in _own(template, replicas):
        file.write((own["slot"] + np.uint32(slots)).astype("<u4").tobytes())
    _write_rows(file, template, replicas)


def _common_lists(entries: Column, template: Template, replicas: int) -> Column:
    """The lists under keys that no mask changes: what is shared once, what is not once a replica."""
    shared = entries["slot"] < FIRST_SLOT + template.shared
    repeated = np.repeat(entries[~shared], replicas)
    step = template.slots_of(1)
    repeated["slot"] += np.tile(np.arange(replicas, dtype=np.uint32) * np.uint32(step), int((~shared).sum()))
    both = np.concatenate((entries[shared], repeated))
    return both[np.lexsort([both[field] for field in ("slot", "low", "high", "key")])]


def sorted_entries(template: Template, replicas: int) -> Iterator[Column]:
    """All registrations (ENTRY) of so many replicas by key, filter and slot, in 256 parts: what a sorted image needs.

    A mask moves all keys with one first byte to another one, so each part is made of one slice of every replica.
    """
    order = ("slot", "low", "high", "key")
    entries = template.entries[np.lexsort([template.entries[field] for field in order])]
    masked = template.entry_masked[np.lexsort([template.entries[field] for field in order])]
    common = _common_lists(entries[~masked], template, replicas)
    own = entries[masked]
    bytes_of = np.arange(257, dtype=np.uint64)
    own_at, common_at = (np.searchsorted(some["key"] >> np.uint64(56), bytes_of).tolist() for some in (own, common))
    masks = list(_own(template, replicas))
    for first in range(256):
        parts = [common[common_at[first] : common_at[first + 1]]]
        for mask, slots in masks:
            source = first ^ int(mask >> np.uint64(56))
            some = own[own_at[source] : own_at[source + 1]].copy()
            some["key"] ^= mask
            some["slot"] += np.uint32(slots)
            parts.append(some)
        part = np.concatenate(parts)
        yield part[np.lexsort([part[field] for field in order])]


def _write_rows(file: BinaryIO, template: Template, replicas: int) -> None:
    rows = np.zeros(template.segments, dtype=ROW)
    rows["fork"], rows["count"], rows["namespace"] = template.fork, template.count, 1
    for field in ("parent", "origin"):
        relation: Column = getattr(template, field)
        rows[field] = np.where(relation >= 0, relation + FIRST_SLOT, 0)
    for replica, (_, slots) in enumerate(_own(template, replicas)):
        begin = template.shared if replica else 0
        some = rows[begin:].copy()
        for field in ("parent", "origin"):
            some[field][some[field] >= FIRST_SLOT + template.shared] += slots
        some["image"] = (np.arange(begin, template.segments, dtype=np.uint64) + np.uint64(slots)) * RECORD_BYTES + 1
        file.write(some.tobytes())


# --- a hash map of blocks ---------------------------------------------------------------------------------------------


def write_blocks(file: BinaryIO, template: Template, replicas: int) -> None:
    """Every block's ID with 16 bytes: who holds it, in which generation, on which tier."""
    blocks = np.zeros(template.blocks, dtype=BLOCK)
    blocks["flags"] = 1
    blocks["holder"] = np.arange(template.blocks) % len(template.workers)
    _numbers(file, template.blocks_of(replicas))
    for replica, (mask, _) in enumerate(_own(template, replicas)):
        begin = template.shared_blocks if replica else 0
        some = blocks[begin:]
        some["id"] = template.home[begin:] ^ mask
        file.write(some.tobytes())


# --- a radix tree -----------------------------------------------------------------------------------------------------


def _nodes(template: Template) -> tuple[Column, Column, Column, int]:
    """(parents, segments, counts) of the nodes of the template's tree, numbered from 1; how many are shared."""
    cuts: list[set[int]] = [set() for _ in range(template.segments)]
    for segment in range(template.segments):
        if template.origin[segment] >= 0:
            cuts[template.origin[segment]].add(int(template.fork[segment]))
    ending: list[dict[int, int]] = []  # by segment: the node that ends at a block
    parents, segments, counts = [], [], []
    shared = 0
    for segment in range(template.segments):
        begin, count = int(template.fork[segment]), int(template.count[segment])
        if template.origin[segment] >= 0:
            parent = ending[template.origin[segment]][begin]
        elif template.parent[segment] >= 0:
            before = int(template.parent[segment])
            parent = ending[before][int(template.count[before])]
        else:
            parent = NODE_NONE
        ends: dict[int, int] = {}
        for end in [*sorted(cut for cut in cuts[segment] if begin < cut < count), count]:
            parents.append(parent)
            segments.append(segment)
            counts.append(end - begin)
            parent = ends[end] = len(parents)
            begin = end
        ending.append(ends)
        if segment < template.shared:
            shared = len(parents)
    return np.array(parents, dtype="<u4"), np.array(segments), np.array(counts, dtype="<u2"), shared


def write_radix(file: BinaryIO, template: Template, replicas: int) -> None:
    """Every node: its parent, its segment's place on disk, the block IDs of its edge."""
    parents, segments, counts, shared = _nodes(template)
    step = len(parents) - shared
    _numbers(file, shared + replicas * step, template.blocks_of(replicas))
    for replica in range(replicas):
        some = parents[shared if replica else 0 :].copy()
        some[some > shared] += np.uint32(replica * step)
        file.write(some.tobytes())
    for replica, (_, slots) in enumerate(_own(template, replicas)):
        some = segments[shared if replica else 0 :]
        file.write(((some + slots) * RECORD_BYTES + 1).astype("<u8").tobytes())
    for replica in range(replicas):
        file.write(counts[shared if replica else 0 :].tobytes())
    for replica, (mask, _) in enumerate(_own(template, replicas)):
        file.write((template.home[template.shared_blocks if replica else 0 :] ^ mask).tobytes())
