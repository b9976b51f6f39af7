"""Holds every answer of a run against the oracle, in a process of its own.

    python -m tests.chaos.check LEDGER FAULTS       prints a report as JSON; exit status 1 if something is wrong

FAULTS has when which shard could not answer: a JSON list of [shard, from, to], the shard "*" for all of them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.chaos.ledger import Asked, Begun, Ended, Line, Tried, read_ledger
from tests.chaos.oracle import Oracle
from tests.chaos.workload import Placement, Session, sessions

SHOWN_MAX: Final = 8
"""Of each kind of what is wrong."""


class Fault(NamedTuple):
    """A shard could not answer for a time."""

    shard: str
    began: float
    ended: float


class Checker:
    """Looks at one run."""

    def __init__(self, every: Sequence[Session], lines: Sequence[Line], faults: Iterable[Fault]) -> None:
        self._every = every
        self._lines = lines
        self._faults = list(faults)
        self._placement = Placement(list(every))
        self._oracle = Oracle(every, lines)
        self._wrong: dict[str, list[str]] = defaultdict(list)
        self._traffic: Counter[str] = Counter()
        self._phases: dict[str, Counter[str]] = defaultdict(Counter)

    def report(self) -> dict[str, Any]:
        """What was found; `wrong` has all that must not be, by kind."""
        acked = refused = 0
        slowest_s = 0.0
        tried: Counter[str] = Counter()
        for line in self._lines:
            match line:
                case Asked():
                    self._look_at(line)
                    slowest_s = max(slowest_s, line.ended - line.began)
                case Begun():
                    if line.kind != "clear":
                        self._traffic.update(set(self._owners(line.session, line.last)))
                case Tried():
                    tried[f"{line.code} {line.outcome}"] += 1
                    if line.took_s > line.limit_s:
                        self._say("late change", f"change {line.number}: {line.code} after {line.took_s:.2f} s")
                case Ended():
                    acked += line.how == "acked"
                    refused += line.how == "refused"
        total = sum(self._traffic.values())
        return {
            "changes": self._oracle.changes,
            "acked": acked,
            "refused": refused,
            "errors": dict(tried.most_common()),
            "slowest match s": round(slowest_s, 3),
            "traffic": {shard: round(count / total, 3) for shard, count in sorted(self._traffic.items())},
            "phases": {phase: self._summary(counts) for phase, counts in self._phases.items()},
            "wrong": {kind: [len(found), *found[:SHOWN_MAX]] for kind, found in sorted(self._wrong.items())},
        }

    @staticmethod
    def _summary(counts: Counter[str]) -> dict[str, Any]:
        return {
            "matches": counts["matches"],
            "complete": counts["complete"],
            "exact": counts["exact"],
            "cut": {key: counts[key] for key in sorted(counts) if key.startswith("cut ")},
            "hit rate": round(counts["matched"] / max(1, counts["blocks"]), 4),
            "of what was there": round(counts["found"] / max(1, counts["there"]), 5),
        }

    def _say(self, kind: str, what: str) -> None:
        self._wrong[kind].append(what)

    def _owners(self, session: int, blocks: int) -> list[str]:
        return self._placement.owners(self._every[session].prefix(blocks))

    def _look_at(self, asked: Asked) -> None:
        owners = self._owners(asked.session, asked.blocks)
        self._traffic.update(set(owners))
        counts = self._phases[asked.phase]
        counts["matches"] += 1
        what = f"{asked.phase} {asked.began:.3f} to {asked.ended:.3f}, {asked.wire}, {asked.blocks} blocks of "
        what += f"session {asked.session} ({'+'.join(owners)}): "
        if asked.failed:
            self._say("failed match", what + asked.failed)
            return
        bounds = self._oracle.bounds(asked.session, asked.blocks, asked.began, asked.ended)
        counts["blocks"] += asked.blocks
        counts["matched"] += asked.matched
        counts["there"] += bounds.low
        counts["found"] += min(asked.matched, bounds.low)
        if asked.matched > bounds.high:
            self._say("wrong block", what + f"matched {asked.matched}, at most {bounds.high} can have been there")
        for worker, held in asked.workers.items():
            most = self._oracle.possible_prefix(asked.session, held, worker, asked.began, asked.ended)
            if held > most or held > asked.matched:
                self._say("wrong block", what + f"{worker} holds {held}, can have held {most}")
        if not asked.complete:
            for reason in asked.degraded:
                counts[f"cut {reason}"] += 1
            if not self._excused(owners, asked):
                self._say("incomplete though all owners live", what + ", ".join(asked.degraded))
            return
        counts["complete"] += 1
        counts["exact"] += bounds.low == bounds.high == asked.matched
        if asked.matched < bounds.low:
            self._say("lost", what + f"matched {asked.matched}, {bounds.low} are there")
        for worker, least in bounds.workers_low.items():
            if asked.workers.get(worker, 0) < least:
                self._say("lost", what + f"{worker} holds {asked.workers.get(worker, 0)}, not {least}")

    def _excused(self, owners: Sequence[str], asked: Asked) -> bool:
        return any(
            fault.shard in ("*", *owners) and fault.began <= asked.ended and asked.began <= fault.ended
            for fault in self._faults
        )


def check(ledger: Path, faults: Path) -> dict[str, Any]:
    """The report about a run."""
    lines = list(read_ledger(ledger))
    return Checker(sessions(), lines, (Fault(*one) for one in json.loads(faults.read_bytes()))).report()


def main() -> int:
    """Print the report."""
    report = check(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps(report, indent=1))  # noqa: T201
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
