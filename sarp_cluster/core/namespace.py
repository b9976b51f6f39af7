"""A namespace's key: what keeps the block IDs of one namespace apart from those of every other."""

from __future__ import annotations

import hashlib
from typing import Final

from sarp_cluster.core.block_id import NAMESPACE_KEY_BYTES
from sarp_cluster.errors import BadRequestError
from sarp_cluster.types import NamespaceSpec

SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = hashlib.blake2b.MAX_KEY_SIZE

_FORMAT_VERSION: Final = 1
_PERSONALIZATION: Final = b"sarp-namespace"


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def key_check(key: bytes) -> bytes:
    """8 bytes that tell whether a key is the one they were made of. They are kept beside what the key keeps apart."""
    return hashlib.blake2b(key, digest_size=8, person=b"sarp-key-check").digest()


def derive_namespace_key(secret: bytes, spec: NamespaceSpec, purges: int = 0) -> bytes:
    """The 48 bytes of `spec`'s key under the index's `secret`. The result must never change: records depend on it.

    `purges`: how often its tenant was purged. Its namespaces have other keys after each, so that nothing from before is
    found.

    Each text goes in behind its length. Without it, fields that merely run together alike, such as tenant "ab" with
    model "c" and tenant "a" with model "bc", would share a key, and one tenant would meet another's blocks.
    """
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise BadRequestError(
            f"secret: {len(secret)} bytes are not {SECRET_BYTES_MIN}..{SECRET_BYTES_MAX}", field="secret"
        )
    digest = hashlib.blake2b(key=secret, person=_PERSONALIZATION, digest_size=NAMESPACE_KEY_BYTES)
    _digest_spec(digest, spec)
    if purges:
        digest.update(_u32(purges))
    return digest.digest()


def derive_namespace_id(secret: bytes, spec: NamespaceSpec) -> str:
    """What requests name a namespace by: 32 hexadecimal digits, the same on every node that has the secret.

    It does not tell what it stands for, and nobody can guess that of another tenant.
    """
    digest = hashlib.blake2b(key=secret, person=b"sarp-name-id", digest_size=16)
    _digest_spec(digest, spec)
    return digest.hexdigest()


def _digest_spec(digest: hashlib.blake2b, spec: NamespaceSpec) -> None:
    digest.update(_u32(_FORMAT_VERSION))
    for text in (spec.tenant, spec.model, spec.lora, spec.salt):
        encoded = text.encode()
        digest.update(_u32(len(encoded)) + encoded)
    digest.update(_u32(spec.block_size))
    profile = spec.hash_profile.value.encode()
    digest.update(_u32(len(profile)) + profile)
