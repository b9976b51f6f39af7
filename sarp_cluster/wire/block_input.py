"""What a request says of blocks, as packed wire IDs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from sarp_cluster import limits
from sarp_cluster.core.block_id import xxh3_block_ids
from sarp_cluster.errors import BadRequestError, TooLargeError
from sarp_cluster.types import HashProfile, NamespaceSpec, Worker
from sarp_cluster.wire.messages import Change, MatchRequest

ID_BYTES = 8
TOKEN_BYTES = 4


def sequence(request: MatchRequest | Change, spec: NamespaceSpec) -> bytes:
    """The wire IDs (u64 little-endian) that a request gives, or those of the tokens that it gives.

    Raises BadRequestError or TooLargeError naming the field.
    """
    given, tokens = request.block_ids, request.token_ids
    if (given is None) == (tokens is None):
        raise BadRequestError("block_ids: give either block_ids or token_ids", field="block_ids")
    if given is not None:
        block_ids = given if isinstance(given, bytes) else pack_integers(given, "Q", "block_ids")
        if len(block_ids) % ID_BYTES:
            raise BadRequestError(f"block_ids: {len(block_ids)} bytes are not a multiple of 8", field="block_ids")
    else:
        if spec.hash_profile is not HashProfile.XXH3:
            raise BadRequestError(
                f"token_ids: block IDs of the {spec.hash_profile} profile are made by the caller", field="token_ids"
            )
        packed = tokens if isinstance(tokens, bytes) else pack_integers(tokens or [], "I", "token_ids")
        if len(packed) % TOKEN_BYTES:
            raise BadRequestError(f"token_ids: {len(packed)} bytes are not a multiple of 4", field="token_ids")
        if len(packed) // TOKEN_BYTES > limits.REQUEST_TOKENS_MAX:
            raise TooLargeError(
                f"token_ids: {len(packed) // TOKEN_BYTES} are over the limit of {limits.REQUEST_TOKENS_MAX}",
                field="token_ids",
            )
        block_ids = xxh3_block_ids(packed, spec.block_size, spec.lora, spec.salt)
    if len(block_ids) // ID_BYTES > limits.REQUEST_BLOCKS_MAX:
        raise TooLargeError(
            f"block_ids: {len(block_ids) // ID_BYTES} are over the limit of {limits.REQUEST_BLOCKS_MAX}",
            field="block_ids",
        )
    return block_ids


def workers_of(request: MatchRequest) -> list[Worker] | None:
    """The workers whose locations count; None: everybody's."""
    if request.workers is None:
        return None
    for one in request.workers:
        if len(one.worker.encode()) > limits.NAME_BYTES_MAX:
            raise BadRequestError(f"workers: a name is over {limits.NAME_BYTES_MAX} bytes of UTF-8", field="workers")
    return [Worker(one.worker, one.dp_rank) for one in request.workers]


def check_handle(request: Change) -> None:
    """Refuse a handle that does not fit: msgspec bounds integers by 63 bits at most."""
    handle = getattr(request, "handle", None)
    if handle is not None and not 0 <= handle < 2**64:
        raise BadRequestError(f"handle: {handle} is not an integer in 0..2^64 - 1", field="handle")


def root_of(root: bytes | int | None) -> bytes | None:
    """The first block ID that a request with an offset gives, packed."""
    if isinstance(root, int):
        if not 0 <= root < 2**64:
            raise BadRequestError(f"root: {root} is not a block ID", field="root")
        return root.to_bytes(ID_BYTES, "little")
    return root


def pack_integers(numbers: Iterable[int], kind: str, field: str) -> bytes:
    """A list of integers as an array of u64 ("Q") or u32 ("I"), little-endian."""
    try:
        packed = array(kind, numbers)
    except OverflowError:
        limit = 64 if kind == "Q" else 32
        raise BadRequestError(f"{field}: not all are integers in 0..2^{limit} - 1", field=field) from None
    if array("H", [1]).tobytes() != b"\x01\x00":
        packed.byteswap()
    return packed.tobytes()
