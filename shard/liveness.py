"""Which workers are left out of answers: those that drain, are gone, or were not heard for too long (design §6)."""

from __future__ import annotations

from collections.abc import Iterable

from sarp_cluster.cluster.registry import WorkerEntry
from sarp_cluster.core.worker_table import WorkerTable
from sarp_cluster.types import Worker


class Liveness:
    """Silence is measured up to the last time that *anybody* was heard: where routers or the network are gone, nobody
    is taken for dead."""

    def __init__(self, table: WorkerTable) -> None:
        self._table = table
        self._watched: dict[Worker, float] = {}
        """Seconds of silence that are too many, of those that send heartbeats."""
        self._heard: dict[Worker, float] = {}
        self._retired: set[Worker] = set()
        self._last = float("-inf")
        self._silent: frozenset[Worker] = frozenset()
        self._mask: bytes | None = None

    def registered(self, entry: WorkerEntry, now: float) -> None:
        """A worker's entry has changed. Whoever is new counts as heard."""
        worker = entry.worker
        if entry.gone or entry.draining:
            self._retired.add(worker)
        else:
            self._retired.discard(worker)
        if entry.heartbeat_ttl_ms and not entry.gone:
            self._watched[worker] = entry.heartbeat_ttl_ms / 1000
            self._heard.setdefault(worker, max(now, self._last))
        else:
            self._watched.pop(worker, None)
            self._heard.pop(worker, None)
        self._mask = None
        self._look()

    def heard(self, workers: Iterable[Worker], now: float) -> None:
        """A router has heard these, and is there itself."""
        self._last = now
        for worker in workers:
            if worker in self._watched:
                self._heard[worker] = now
        self._look()

    def silent(self, worker: Worker) -> bool:
        """Has the worker not been heard for too long?"""
        return worker in self._silent

    def _look(self) -> None:
        silent = frozenset(
            worker for worker, limit in self._watched.items() if self._last - self._heard[worker] > limit
        )
        if silent != self._silent:
            self._silent = silent
            self._mask = None

    def mask(self) -> bytes | None:
        """One byte a worker of the index, 1 where its locations count; None: all do."""
        if not self._silent and not self._retired:
            return None
        if self._mask is None or len(self._mask) != self._table.count:
            mask = bytearray(b"\x01") * self._table.count
            for worker in (*self._silent, *self._retired):
                index = self._table.find(*worker)
                if index is not None:
                    mask[index] = 0
            self._mask = bytes(mask)
        return self._mask
