"""Namespaces and workers as records: what the log tells of them one by one, and a manifest all at once."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from sarp_cluster.errors import StorageError
from sarp_cluster.storage.record import RecordType


class NamespaceRecord(NamedTuple):
    """A namespace as the log has it."""

    number: int
    fields: tuple[str, ...]
    """Tenant, model, LoRA, salt, hash profile; the tenant's purges where there were any."""
    block_size: int
    key_check: bytes
    """Tells whether a key is the namespace's without telling the key."""


class WorkerRecord(NamedTuple):
    """A worker as the log has it."""

    number: int
    instance_id: str
    dp_rank: int
    generation: int
    seq: int


def _name_bytes(text: str) -> bytes:
    """A name in a record: its length, then UTF-8."""
    encoded = text.encode()
    return struct.pack("<H", len(encoded)) + encoded


def _names(payload: bytes, at: int) -> list[str]:
    names = []
    while at < len(payload):
        (length,) = struct.unpack_from("<H", payload, at)
        names.append(payload[at + 2 : at + 2 + length].decode())
        at += 2 + length
    return names


def pack_namespace(number: int, fields: Iterable[str], block_size: int, key_check: bytes) -> bytes:
    """Payload of a NAMESPACE record."""
    return struct.pack("<II8s", number, block_size, key_check) + b"".join(_name_bytes(field) for field in fields)


def pack_worker(number: int, instance_id: str, dp_rank: int) -> bytes:
    """Payload of a WORKER record."""
    return struct.pack("<IH", number, dp_rank) + _name_bytes(instance_id)


def pack_worker_mark(number: int, generation: int, seq: int) -> bytes:
    """Payload of a WORKER_MARK record."""
    return struct.pack("<IIq", number, generation, seq)


def pack_registry(namespaces: Iterable[NamespaceRecord], workers: Iterable[WorkerRecord]) -> list[tuple[int, bytes]]:
    """All records of these namespaces and workers."""
    records: list[tuple[int, bytes]] = [(RecordType.NAMESPACE, pack_namespace(*namespace)) for namespace in namespaces]
    for worker in workers:
        records.append((RecordType.WORKER, pack_worker(worker.number, worker.instance_id, worker.dp_rank)))
        records.append((RecordType.WORKER_MARK, pack_worker_mark(worker.number, worker.generation, worker.seq)))
    return records


def replay_registry(
    records: Iterable[tuple[int, bytes]],
    known_namespaces: Iterable[NamespaceRecord] = (),
    known_workers: Iterable[WorkerRecord] = (),
    *,
    gaps: bool = False,
) -> tuple[list[NamespaceRecord], list[WorkerRecord]]:
    """Namespaces and workers in the order of their numbers, as (type, payload) records have them.

    The same again is harmless. With `gaps`, log files are missing that were reclaimed. Raises struct.error, ValueError
    or KeyError for a record that makes no sense.
    """
    namespaces = {namespace.number: namespace for namespace in known_namespaces}
    workers = {worker.number: worker for worker in known_workers}
    for kind, payload in records:
        if kind == RecordType.NAMESPACE:
            number, block_size = struct.unpack_from("<II", payload)
            namespaces[number] = NamespaceRecord(number, tuple(_names(payload, 16)), block_size, payload[8:16])
        elif kind == RecordType.WORKER:
            number, dp_rank = struct.unpack_from("<IH", payload)
            (instance_id,) = _names(payload, 6)
            if number not in workers:
                workers[number] = WorkerRecord(number, instance_id, dp_rank, 0, -1)
        elif kind == RecordType.WORKER_MARK:
            number, generation, seq = struct.unpack_from("<IIq", payload)
            if gaps and number not in workers:
                continue  # its record was in a file that is reclaimed, and was put again behind this, a newer mark too
            workers[number] = workers[number]._replace(generation=generation, seq=seq)
        elif kind not in (RecordType.FILE_HEADER, RecordType.ROUTING, RecordType.RECLAIMED, RecordType.LOST):
            raise StorageError(f"a record of type {kind}, which this program does not know: open it with a newer one")
    return [namespaces[number] for number in sorted(namespaces)], [workers[number] for number in sorted(workers)]
