"""Block IDs: Dynamo's published values, the reference hash, and the namespace's permutation."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sarp_cluster import limits
from sarp_cluster.core.block_id import NamespaceKey, local_block_hashes, xxh3, xxh3_block_ids
from sarp_cluster.core.namespace import derive_namespace_key
from sarp_cluster.errors import BadRequestError, TooLargeError
from sarp_cluster.types import HashProfile, NamespaceSpec

SEED = 1337
SECRET = bytes(range(32))
SPEC = NamespaceSpec(model="m")
U64 = st.integers(0, 2**64 - 1)

# Tokens 1..12 in blocks of 4. The first row is Dynamo's own; the others follow from its rule.
GOLDEN = [
    (
        "",
        "",
        [14643705804678351452, 16777012769546811212, 483935686894639516],
        [14643705804678351452, 4945711292740353085, 12583592247330656132],
    ),
    (
        "adapter-a",
        "",
        [11381080598872079209, 5698110331184095209, 10923852707342720619],
        [11381080598872079209, 17518568667535815909, 12857975441449519705],
    ),
    (
        "",
        "tenant-a",
        [5738685477468498325, 11202231085456067787, 9318114775459440904],
        [5738685477468498325, 1076233986426276607, 14251413665512820044],
    ),
    (
        "adapter-a",
        "tenant-a",
        [9967753091837871098, 17145582438027477403, 1573782188507051189],
        [9967753091837871098, 8253787442643436499, 6376789474022567002],
    ),
]

GOLDEN_KEY = "4a57dbb24b0697ec8e20dc37a7ecb9cf00bdff31f71b853919749558ff0fd5d3487829dfcfe7960f963410e364e87afe"
GOLDEN_INTERNAL = [2464327940229536909, 5305500258018012663, 3133925254657847900]


def packed_u32(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def packed_u64(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}Q", *ids)


def unpacked_u64(ids: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(ids) // 8}Q", ids))


def reference_hashes(tokens: bytes, block_size: int, lora: str, salt: str) -> tuple[list[int], list[int]]:
    seed = SEED
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxhash.xxh3_64_intdigest(salt.encode(), 1)
    step = 4 * block_size
    local = [
        xxhash.xxh3_64_intdigest(tokens[at : at + step], seed % 2**64) for at in range(0, len(tokens) - step + 1, step)
    ]
    chained = local[:1]
    for one in local[1:]:
        chained.append(xxhash.xxh3_64_intdigest(packed_u64([chained[-1], one]), SEED))
    return local, chained


@pytest.mark.parametrize(("lora", "salt", "local", "chained"), GOLDEN)
def test_ids_equal_the_published_values(lora: str, salt: str, local: list[int], chained: list[int]) -> None:
    tokens = packed_u32(list(range(1, 13)))
    assert unpacked_u64(local_block_hashes(tokens, 4, lora, salt)) == local
    assert unpacked_u64(xxh3_block_ids(tokens, 4, lora=lora, salt=salt)) == chained


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 16, 31, 32, 33, 48, 60, 61, 64, 256, 257, 512, 1000, 4096])
def test_ids_equal_the_reference_hash_in_every_length_class(block_size: int) -> None:
    rng = random.Random(block_size)
    tokens = rng.randbytes(4 * block_size * 4 + 4 * rng.randrange(block_size))
    for lora, salt in (("", ""), ("a", ""), ("", "s"), ("größe", "\0")):
        local, chained = reference_hashes(tokens, block_size, lora, salt)
        assert unpacked_u64(local_block_hashes(tokens, block_size, lora, salt)) == local
        assert unpacked_u64(xxh3_block_ids(tokens, block_size, lora, salt)) == chained


@given(st.binary(max_size=1200), st.integers(1, 40), st.text(max_size=300), st.text(max_size=300))
def test_ids_equal_the_reference_hash(tokens: bytes, block_size: int, lora: str, salt: str) -> None:
    tokens = tokens[: len(tokens) // 4 * 4]
    local, chained = reference_hashes(tokens, block_size, lora, salt)
    assert unpacked_u64(local_block_hashes(tokens, block_size, lora, salt)) == local
    assert unpacked_u64(xxh3_block_ids(tokens, block_size, lora, salt)) == chained


def test_the_hash_equals_the_reference_at_every_length() -> None:
    rng = random.Random(1)
    data = rng.randbytes(5000)
    for length in range(5001):
        for seed in (0, SEED, 2**64 - 1, rng.getrandbits(64)):
            assert xxh3(data[:length], seed) == xxhash.xxh3_64_intdigest(data[:length], seed)


def test_an_id_names_all_tokens_before_it() -> None:
    one = packed_u32([1, 2, 3, 4, 5, 6, 7, 8])
    other = packed_u32([9, 2, 3, 4, 5, 6, 7, 8])
    assert local_block_hashes(one, 4)[8:] == local_block_hashes(other, 4)[8:]
    assert xxh3_block_ids(one, 4)[8:] != xxh3_block_ids(other, 4)[8:]


def test_a_partial_tail_has_no_id() -> None:
    tokens = packed_u32(list(range(11)))
    assert xxh3_block_ids(tokens, 4) == xxh3_block_ids(tokens[:32], 4)
    assert xxh3_block_ids(tokens, 12) == b""
    assert xxh3_block_ids(b"", 16) == b""


def test_any_contiguous_buffer_of_tokens_will_do() -> None:
    array = np.arange(64, dtype="<u4")
    expected = xxh3_block_ids(array.tobytes(), 16)
    shifted = memoryview(b"x" + array.tobytes())[1:]
    for tokens in (array.data, bytearray(array.tobytes()), memoryview(array.tobytes()), shifted):
        assert xxh3_block_ids(tokens, 16) == expected


def test_a_length_that_is_no_whole_number_of_tokens_is_refused() -> None:
    with pytest.raises(BadRequestError, match="multiple of 4") as refused:
        xxh3_block_ids(b"\0" * 63, 4)
    assert refused.value.field == "token_ids"


def test_more_tokens_than_the_bound_are_refused() -> None:
    tokens = bytes(4 * limits.REQUEST_TOKENS_MAX)
    assert len(xxh3_block_ids(tokens, 4096)) == 8 * limits.REQUEST_TOKENS_MAX // 4096
    with pytest.raises(TooLargeError, match="REQUEST_TOKENS_MAX") as refused:
        xxh3_block_ids(tokens + bytes(4), 4096)
    assert refused.value.field == "token_ids"


@pytest.mark.parametrize("block_size", [0, -1, limits.BLOCK_TOKENS_MAX + 1, 2**70])
def test_a_block_size_out_of_range_is_refused(block_size: int) -> None:
    for hashes in (xxh3_block_ids, local_block_hashes):
        with pytest.raises(BadRequestError, match="BLOCK_TOKENS_MAX") as refused:
            hashes(bytes(64), block_size)
        assert refused.value.field == "block_size"


def test_what_is_no_buffer_is_refused() -> None:
    with pytest.raises(TypeError):
        xxh3_block_ids([1, 2, 3, 4], 4)  # type: ignore[arg-type]
    with pytest.raises((BufferError, ValueError)):
        xxh3_block_ids(np.arange(64, dtype="<u4")[::2].data, 4)


def reference_permutation(key: bytes, wire_id: int) -> int:
    words = unpacked_u64(key)
    for offset, multiplier in zip(words[::2], words[1::2], strict=True):
        wire_id = (wire_id ^ offset) * (multiplier | 1) % 2**64
        wire_id ^= wire_id >> 32
    return wire_id


@given(st.binary(min_size=48, max_size=48), st.lists(U64, max_size=20))
def test_internal_ids_lead_back_to_wire_ids(key: bytes, ids: list[int]) -> None:
    namespace = NamespaceKey(key)
    internal = namespace.internal_ids(packed_u64(ids))
    assert unpacked_u64(internal) == [reference_permutation(key, one) for one in ids]
    assert namespace.wire_ids(internal) == packed_u64(ids)
    assert namespace.internal_ids(namespace.wire_ids(packed_u64(ids))) == packed_u64(ids)


def test_the_permutation_equals_its_golden_value() -> None:
    # Records hold internal IDs: a change of this value would make every stored block unreachable.
    namespace = NamespaceKey(derive_namespace_key(SECRET, SPEC))
    assert unpacked_u64(namespace.internal_ids(packed_u64([0, 1, 2**63]))) == GOLDEN_INTERNAL


def test_a_flipped_bit_changes_half_the_bits_under_any_key() -> None:
    rng = np.random.default_rng(7)
    changes = np.zeros((64, 64))
    rounds = 400
    for _ in range(rounds):
        namespace = NamespaceKey(rng.bytes(48))
        one = rng.integers(0, 2**64, dtype=np.uint64)
        flipped = one ^ (np.uint64(1) << np.arange(64, dtype=np.uint64))
        images = np.frombuffer(namespace.internal_ids(np.append(flipped, one).data), dtype="<u8")
        bits = np.unpackbits((images[:64] ^ images[64]).view(np.uint8).reshape(64, 8), axis=1, bitorder="little")
        changes += bits
    # Each of the 64 x 64 shares has a standard deviation of 2.5 % around one half; six of them are 15 %.
    assert np.abs(changes / rounds - 0.5).max() < 0.15


def test_different_namespaces_give_different_internal_ids() -> None:
    wire = packed_u64(list(range(1000)))
    specs = [
        SPEC,
        replace(SPEC, tenant="other"),
        replace(SPEC, model="other"),
        replace(SPEC, lora="other"),
        replace(SPEC, salt="other"),
        replace(SPEC, block_size=32),
        replace(SPEC, hash_profile=HashProfile.OPAQUE),
    ]
    seen: set[int] = set()
    for spec in specs:
        seen.update(unpacked_u64(NamespaceKey(derive_namespace_key(SECRET, spec)).internal_ids(wire)))
    seen.update(unpacked_u64(NamespaceKey(derive_namespace_key(SECRET[:16], SPEC)).internal_ids(wire)))
    assert len(seen) == 8 * 1000


def test_fields_that_run_together_alike_have_different_keys() -> None:
    keys = {
        derive_namespace_key(SECRET, NamespaceSpec(tenant=tenant, model=model, lora=lora, salt=salt))
        for tenant, model, lora, salt in [
            ("ab", "c", "", ""),
            ("a", "bc", "", ""),
            ("abc", "", "", ""),
            ("", "abc", "", ""),
            ("", "", "abc", ""),
            ("", "", "", "abc"),
        ]
    }
    assert len(keys) == 6


def test_a_namespace_key_equals_its_golden_value() -> None:
    assert derive_namespace_key(SECRET, SPEC).hex() == GOLDEN_KEY


@pytest.mark.parametrize("length", [0, 15, 65])
def test_a_secret_too_short_or_too_long_is_refused(length: int) -> None:
    with pytest.raises(BadRequestError, match=r"16\.\.64"):
        derive_namespace_key(bytes(length), SPEC)


@pytest.mark.parametrize("length", [0, 47, 49])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="48 bytes"):
        NamespaceKey(bytes(length))


def test_ids_that_are_no_whole_words_are_refused() -> None:
    namespace = NamespaceKey(bytes(48))
    for mapped in (namespace.internal_ids, namespace.wire_ids):
        with pytest.raises(BadRequestError, match="multiple of 8") as refused:
            mapped(bytes(9))
        assert refused.value.field == "block_ids"
