"""One shard as the coordinator sees it: its state, the edges along which that moves, and its story.

    joining ──► recovering ──► serving ──► draining
                      each of them ──► suspect ──► down ──► (heard again) what it says of itself

An incarnation that drains does not serve again; another one of the same store may be in any state.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from sarp_cluster.errors import InvariantViolationError
from sarp_cluster.wire.control import ShardHeartbeat
from sarp_cluster.wire.messages import ShardState

LIVE: Final[tuple[ShardState, ...]] = ("joining", "recovering", "serving", "draining")
"""States of a shard that is heard and answers."""

EDGES: Final[dict[ShardState, tuple[ShardState, ...]]] = {
    "joining": ("recovering", "serving", "draining", "suspect", "down"),
    "recovering": ("serving", "draining", "suspect", "down"),
    "serving": ("recovering", "draining", "suspect", "down"),  # back: it was away, and fetches what it lacks
    "draining": ("suspect", "down"),
    "suspect": (*LIVE, "down"),
    "down": LIVE,
}
"""Where a shard's state may go while it is the same incarnation; another one may be anything that is LIVE."""

STORY_KEPT: Final = 32
RETIRED_KEPT: Final = 64


class Transition(NamedTuple):
    """One step of a story."""

    time: float
    before: ShardState
    after: ShardState
    why: str


class InvalidTransitionError(InvariantViolationError):
    """A state was to move along no edge: a bug. The message tells the shard's story."""


class TrackedShard:
    """What is known of a shard. The state machine alone changes it."""

    __slots__ = (
        "clash",
        "clash_told",
        "conflict_told",
        "drained",
        "draining_incarnation",
        "epoch",
        "ghost",
        "heard_at",
        "holder",
        "http",
        "incarnation",
        "killed_at",
        "lease_end",
        "managed",
        "name",
        "nonce",
        "number",
        "pid",
        "probes_failed",
        "report",
        "retired",
        "since",
        "state",
        "store",
        "story",
        "stream",
    )

    def __init__(self, name: str, now: float, *, managed: bool) -> None:
        self.name = name
        self.managed = managed
        """Its process is one that we start and end."""
        self.store = ""
        """Identity of its directory; empty: it never joined."""
        self.incarnation = ""
        self.retired: deque[str] = deque(maxlen=RETIRED_KEPT)
        """Incarnations before this one."""
        self.pid = 0
        self.http = ""
        self.stream = ""
        self.state: ShardState = "joining"
        self.since = now
        """When the state was entered; before that, when the coordinator began."""
        self.story: deque[Transition] = deque(maxlen=STORY_KEPT)
        self.heard_at: float | None = None
        self.report: ShardHeartbeat | None = None
        self.epoch = 0
        self.nonce = b""
        self.number = 0
        self.probes_failed = 0
        """In a row."""
        self.holder: str | None = None
        """The incarnation that was granted a lease which may not have ended."""
        self.lease_end = now
        self.killed_at: float | None = None
        self.drained = False
        """An operator had it drained: it is not started again before an operator says so."""
        self.draining_incarnation = ""
        """The one that said it drains."""
        self.ghost: tuple[str, float] | None = None
        """A retired incarnation that was heard since the present one took over, and when first."""
        self.clash: dict[str, float] = {}
        """Incarnations that are there at once, and when each was heard; empty: there is no clash."""
        self.clash_told = ""
        """The other store of which the timeline tells already."""
        self.conflict_told = b""
        """The other map's nonce of which the timeline tells already."""

    @property
    def live(self) -> bool:
        """Is it heard, and does it answer?"""
        return self.state in LIVE

    def move(self, state: ShardState, why: str, now: float, *, restarted: bool = False) -> bool:
        """Enter a state. False: it was in that one. Raises InvalidTransitionError where no edge leads."""
        if state == self.state and not restarted:
            return False
        if state not in (LIVE if restarted else EDGES[self.state]):
            raise InvalidTransitionError(f"shard {self.name!r}: {self.state} -> {state} ({why}); {self.tell()}")
        changed = state != self.state
        self.story.append(Transition(now, self.state, state, why))
        self.state = state
        self.since = now
        return changed

    def tell(self) -> str:
        """The story in one line."""
        return "its story: " + (
            "; ".join(f"{step.time:.3f} {step.before} -> {step.after}: {step.why}" for step in self.story) or "none"
        )

    def said(self) -> ShardState:
        """The state that follows from what it last said of itself."""
        if self.report is None or self.epoch == 0:
            return "joining"
        if self.draining_incarnation == self.incarnation:
            return "draining"  # a late word from before cannot take that back
        return self.report.state
