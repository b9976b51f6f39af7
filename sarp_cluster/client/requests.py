"""What callers give, as messages: namespaces, tokens and block IDs in any of the forms in which engines have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sarp_cluster import limits
from sarp_cluster.core.block_id import NamespaceKey, xxh3_block_ids
from sarp_cluster.errors import BadRequestError
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from sarp_cluster.wire import messages
from sarp_cluster.wire.block_input import pack_integers

Integers: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.integer] | Sequence[int]"
"""Token or block IDs: little-endian bytes (u32 or u64), a NumPy array of any integer type, or any sequence."""
WorkerLike: TypeAlias = "Worker | tuple[str, int] | str"
"""A worker; a bare name stands for rank 0."""

_KINDS: Final = {"I": "<u4", "Q": "<u8"}


class Namespace:
    """A namespace of the cluster: its id, what makes its block IDs, and the key by which requests are placed."""

    def __init__(self, reply: messages.NamespaceReply) -> None:
        self.id = reply.namespace
        """By which requests name it."""
        self.block_size = reply.block_size
        """Tokens a block."""
        self.spec = NamespaceSpec(
            model=reply.model,
            lora=reply.lora,
            salt=reply.salt,
            block_size=reply.block_size,
            hash_profile=reply.hash_profile,
        )
        """What it was created with. The tenant is the credential's; it is not repeated here."""
        self.key = None if reply.key is None else NamespaceKey(reply.key)
        """Of its internal block IDs; another one after a purge of the tenant."""

    def block_ids(self, tokens: Integers) -> bytes:
        """IDs (u64 little-endian) of the full blocks of these tokens. BadRequestError for the opaque profile."""
        if self.spec.hash_profile is not HashProfile.XXH3:
            raise BadRequestError("tokens: block IDs of the opaque profile are made by the caller", field="tokens")
        return xxh3_block_ids(pack_tokens(tokens), self.block_size, self.spec.lora, self.spec.salt)

    def __repr__(self) -> str:
        return f"<Namespace {self.id} of {self.spec.model!r}>"


def pack_tokens(tokens: Integers) -> bytes:
    """Token IDs as u32 little-endian."""
    return _packed(tokens, "I", "tokens")


def pack_block_ids(block_ids: Integers) -> bytes:
    """Block IDs as u64 little-endian."""
    return _packed(block_ids, "Q", "block_ids")


def _packed(given: Integers, kind: str, field: str) -> bytes:
    if isinstance(given, bytes):
        return given
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    if isinstance(given, np.ndarray):
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise BadRequestError(f"{field}: an array of {given.ndim} dimensions of {given.dtype}", field=field)
        if given.dtype == _KINDS[kind]:
            return given.tobytes()
        if len(given) and (int(given.min()) < 0 or int(given.max()) > np.iinfo(_KINDS[kind]).max):
            raise BadRequestError(f"{field}: not all fit into {_KINDS[kind]}", field=field)
        return given.astype(_KINDS[kind]).tobytes()
    try:
        return pack_integers(given, kind, field)
    except TypeError:
        raise BadRequestError(f"{field}: not all are integers", field=field) from None


class Blocks:
    """What a request says of its blocks: exactly one of the two is given."""

    __slots__ = ("block_ids", "namespace", "token_ids")

    def __init__(self, namespace: Namespace | str, tokens: Integers | None, block_ids: Integers | None) -> None:
        self.namespace = namespace.id if isinstance(namespace, Namespace) else namespace
        self.block_ids = self.token_ids = None
        if (tokens is None) == (block_ids is None):
            raise BadRequestError("block_ids: give either tokens or block_ids", field="block_ids")
        if block_ids is not None:
            self.block_ids = pack_block_ids(block_ids)
        elif tokens is not None and isinstance(namespace, Namespace):
            # Hashed here: eight bytes a block on the wire instead of four a token.
            self.block_ids = namespace.block_ids(tokens)
        elif tokens is not None:
            self.token_ids = pack_tokens(tokens)


def worker_name(worker: WorkerLike) -> messages.WorkerName:
    """A worker as requests name it."""
    if isinstance(worker, str):
        return messages.WorkerName(worker=worker)
    return messages.WorkerName(worker=worker[0], dp_rank=worker[1])


def match_request(
    namespace: Namespace | str,
    *,
    tokens: Integers | None = None,
    block_ids: Integers | None = None,
    detail: str = "workers",
    tiers: Iterable[messages.TierName] | None = None,
    workers: Iterable[WorkerLike] | None = None,
    max_workers: int | None = None,
    deadline_ms: int = limits.MATCH_DEADLINE_MS,
) -> messages.MatchRequest:
    """A match, for `AsyncClient.batch`."""
    blocks = Blocks(namespace, tokens, block_ids)
    return messages.MatchRequest(
        namespace=blocks.namespace,
        block_ids=blocks.block_ids,
        token_ids=blocks.token_ids,
        detail=detail,  # type: ignore[arg-type]  # the node says which there are
        tiers=None if tiers is None else list(tiers),
        workers=None if workers is None else [worker_name(worker) for worker in workers],
        max_workers=max_workers,
        deadline_ms=deadline_ms,
    )


def insert_request(
    namespace: Namespace | str,
    *,
    worker: WorkerLike,
    tokens: Integers | None = None,
    block_ids: Integers | None = None,
    generation: int = 0,
    tier: messages.TierName = "gpu",
    first: int = 0,
    offset: int = 0,
    root: bytes | int | None = None,
    seq: int | None = None,
    handle: int | None = None,
    durable: bool = True,
    deadline_ms: int = limits.INSERT_DEADLINE_MS,
) -> messages.InsertRequest:
    """An insert, for `AsyncClient.batch`."""
    blocks, name = Blocks(namespace, tokens, block_ids), worker_name(worker)
    return messages.InsertRequest(
        namespace=blocks.namespace,
        block_ids=blocks.block_ids,
        token_ids=blocks.token_ids,
        worker=name.worker,
        dp_rank=name.dp_rank,
        generation=generation,
        tier=tier,
        first=first,
        offset=offset,
        root=root,
        seq=seq,
        handle=handle,
        durable=durable,
        deadline_ms=deadline_ms,
    )


def remove_request(
    namespace: Namespace | str,
    *,
    worker: WorkerLike,
    tokens: Integers | None = None,
    block_ids: Integers | None = None,
    generation: int = 0,
    tier: messages.TierName | None = None,
    first: int = 0,
    last: int | None = None,
    seq: int | None = None,
    durable: bool = True,
    deadline_ms: int = limits.INSERT_DEADLINE_MS,
) -> messages.RemoveRequest:
    """A removal, for `AsyncClient.batch`."""
    blocks, name = Blocks(namespace, tokens, block_ids), worker_name(worker)
    return messages.RemoveRequest(
        namespace=blocks.namespace,
        block_ids=blocks.block_ids,
        token_ids=blocks.token_ids,
        worker=name.worker,
        dp_rank=name.dp_rank,
        generation=generation,
        tier=tier,
        first=first,
        last=last,
        seq=seq,
        durable=durable,
        deadline_ms=deadline_ms,
    )
