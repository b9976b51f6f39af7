"""The routers that were heard. Nothing depends on them: they are listed for people, and told what is new."""

from __future__ import annotations

from typing import NamedTuple

from sarp_cluster import limits
from sarp_cluster.errors import TooLargeError
from sarp_cluster.wire.control import RouterHeartbeat
from sarp_cluster.wire.messages import RouterStatus


class _Seen(NamedTuple):
    report: RouterHeartbeat
    heard_at: float


class Routers:
    """By name. One that is silent for long makes room for others."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def heard(self, report: RouterHeartbeat, now: float) -> bool:
        """A router is there. Is it new? Raises TooLargeError where there are too many."""
        new = report.router not in self._seen
        if new:
            for name, seen in list(self._seen.items()):
                if now - seen.heard_at > limits.ROUTER_FORGOTTEN_MS / 1000:
                    del self._seen[name]
            if len(self._seen) >= limits.ROUTERS_MAX:
                raise TooLargeError(f"router: over the limit of {limits.ROUTERS_MAX}", field="router")
        self._seen[report.router] = _Seen(report, now)
        return new

    def status(self, now: float) -> list[RouterStatus]:
        """All of them, by name."""
        return [
            RouterStatus(router=name, http=seen.report.http, epoch=seen.report.epoch, seen_s=now - seen.heard_at)
            for name, seen in sorted(self._seen.items())
        ]
