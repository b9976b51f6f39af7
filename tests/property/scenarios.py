"""What the property tests ask of an index: sequences that share prefixes, changes, questions, settings."""

from __future__ import annotations

from typing import Final, NamedTuple

from hypothesis import strategies as st

from sarp_cluster.config import IndexConfig
from sarp_cluster.types import HashProfile, NamespaceSpec, Tier, Worker

# Three workers: two ranks of one instance, and an instance whose name sorts before the other's.
WORKERS: Final = (Worker("node-b", 0), Worker("node-b", 1), Worker("node-a", 0))
# Two tenants that send the very same block IDs: nothing of one may show up in an answer to the other.
NAMESPACES: Final = tuple(
    NamespaceSpec(tenant=tenant, model="m", hash_profile=HashProfile.OPAQUE) for tenant in ("one", "two")
)

Tokens = tuple[int, ...]
"""A sequence, one token a block. Three tokens only, so that sequences share prefixes of every length."""


def runs(*, stretch: int = 1, min_size: int = 0) -> st.SearchStrategy[Tokens]:
    """Sequences of a few runs of one token each. `stretch` multiplies their lengths."""
    run = st.tuples(st.integers(0, 2), st.integers(1, 5))
    return st.lists(run, min_size=min_size, max_size=5).map(
        lambda drawn: tuple(token for token, length in drawn for _ in range(length * stretch))
    )


class Change(NamedTuple):
    """Who changes what, relative to what is known of the worker: most are in order, some stale, late or repeated."""

    namespace: int
    worker: Worker
    tier: Tier
    handle: int | None
    generation_step: int
    seq_step: int | None


changes: Final = st.builds(
    Change,
    namespace=st.integers(0, len(NAMESPACES) - 1),
    worker=st.sampled_from(WORKERS),
    tier=st.sampled_from(Tier),
    handle=st.sampled_from((None, None, 0, 7, 2**64 - 1)),
    generation_step=st.sampled_from((0, 0, 0, 0, 0, 0, 0, 0, 1, -1)),
    seq_step=st.sampled_from((None, None, 1, 1, 1, 5, 0, -1)),
)


class Question(NamedTuple):
    """How a match is asked."""

    namespace: int
    detail: str = "blocks"
    tiers: frozenset[Tier] | None = None
    workers: frozenset[Worker] | None = None
    max_workers: int | None = None


questions: Final = st.builds(
    Question,
    namespace=st.integers(0, len(NAMESPACES) - 1),
    detail=st.sampled_from(("blocks", "workers", "none")),
    tiers=st.none() | st.frozensets(st.sampled_from(Tier), min_size=1),
    workers=st.none() | st.frozensets(st.sampled_from(WORKERS), min_size=1),
    max_workers=st.none() | st.integers(1, 3),
)

DEFAULTS: Final = IndexConfig()

_NO_CAP: Final[st.SearchStrategy[int | None]] = st.none()
_KEY_BITS: Final = st.just(DEFAULTS.routing_key_bits)
_FIELD_BITS: Final = st.just(DEFAULTS.filter_field_bits)
_MOSTLY: Final = st.sampled_from((True, True, True, False))


def tiny_configs(
    *,
    retrieval_max: st.SearchStrategy[int | None] = _NO_CAP,
    routing_key_bits: st.SearchStrategy[int] = _KEY_BITS,
    filter_field_bits: st.SearchStrategy[int] = _FIELD_BITS,
) -> st.SearchStrategy[IndexConfig]:
    """Settings under which a few short sequences meet every mechanism: refinement, pruning, folding, merging."""
    return st.builds(
        IndexConfig,
        segment_blocks=st.sampled_from((4, 8)),
        base_points=st.just(2),
        refinement_threshold=st.integers(2, 4),
        pruning_threshold=st.integers(1, 2),
        retrieval_max=retrieval_max,
        filter_bits=st.sampled_from((128, 64)),
        refine=_MOSTLY,
        filter=_MOSTLY,
        prune=_MOSTLY,
        strategy=st.sampled_from(("wave", "stepwise")),
        routing_key_bits=routing_key_bits,
        filter_field_bits=filter_field_bits,
        snapshot_log_bytes=st.integers(1, 4_096),
        delta_segments_max=st.integers(0, 2),
        log_file_bytes=st.just(4_096),
    )


def full_size_configs() -> st.SearchStrategy[IndexConfig]:
    """The default segments and points, with the default and the paper's filter, thresholds as they are or soon met."""
    return st.builds(
        IndexConfig,
        refinement_threshold=st.sampled_from((DEFAULTS.refinement_threshold, 2)),
        pruning_threshold=st.sampled_from((DEFAULTS.pruning_threshold, 1)),
        retrieval_max=st.sampled_from((None, DEFAULTS.retrieval_max)),
        filter_bits=st.sampled_from((128, 64)),
        strategy=st.sampled_from(("wave", "stepwise")),
    )


SECRET = bytes(range(32))
"""Of every index: with another one keys collide elsewhere, and a failure could not be repeated."""
