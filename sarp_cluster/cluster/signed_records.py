"""Records that others may touch on their way: each is versioned, signed, and bound to its place (docs/formats.md).

A signature covers the cluster, the key and the field that the record stands at: it can neither be forged nor moved to
another place without the cluster's secret. That all of them are there, and none is older than the rest, is what a
`Digest` of all tells.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, TypeVar

import msgspec

from sarp_cluster.errors import MembershipError, RecordsRejectedError

MAGIC: Final = b"SARPMEM"
FORMAT_VERSION: Final = 1
SIGNATURE_BYTES: Final = 32
_HEAD: Final = MAGIC + str(FORMAT_VERSION).encode()
OVERHEAD_BYTES: Final = len(_HEAD) + SIGNATURE_BYTES

_encoder: Final = msgspec.msgpack.Encoder()
T = TypeVar("T")


class Signer:
    """Signs and checks the records of one cluster."""

    def __init__(self, secret: bytes, cluster: str) -> None:
        self._key = hashlib.blake2b(key=secret, person=b"sarp-membership", digest_size=32).digest()
        self._digest_key = hashlib.blake2b(key=secret, person=b"sarp-all-records", digest_size=32).digest()
        self._cluster = cluster.encode()

    def _signature(self, version: bytes, key: str, field: bytes, payload: bytes) -> bytes:
        place = b"".join(len(part).to_bytes(4, "little") + part for part in (self._cluster, key.encode(), field))
        return hmac.digest(self._key, version + place + payload, "sha256")

    def seal(self, key: str, record: object, field: bytes = b"") -> bytes:
        """The bytes of a record that is to stand at this key, and field of it."""
        payload = _encoder.encode(record)
        return _HEAD + self._signature(_HEAD, key, field, payload) + payload

    def open(
        self, key: str, raw: bytes, decoder: msgspec.msgpack.Decoder[T], *, bytes_max: int, field: bytes = b""
    ) -> T:
        """The record that stands there. Raises RecordsRejectedError unless we wrote it, there."""
        where = f"{key} {field[:64]!r}" if field else key
        if len(raw) > bytes_max:
            raise RecordsRejectedError(f"membership: {where}: {len(raw)} bytes, more than any record of ours has")
        version, signature, payload = raw[: len(_HEAD)], raw[len(_HEAD) : OVERHEAD_BYTES], raw[OVERHEAD_BYTES:]
        signed = hmac.compare_digest(signature, self._signature(version, key, field, payload))
        if not signed or not version.startswith(MAGIC):
            raise RecordsRejectedError(f"membership: {where}: not signed by this cluster, for this place")
        if version != _HEAD:  # of a newer program of this cluster: the signature is where it always is
            raise MembershipError(f"membership: {where}: version {version!r}, this program reads {_HEAD!r}")
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, ValueError) as error:
            raise RecordsRejectedError(f"membership: {where}: signed, and makes no sense: {error}") from error

    def digest(self) -> Digest:
        """Of no records."""
        return Digest(self._digest_key, 0, 0)


class Digest:
    """Of a set of signed records: of the same records it is the same, in whatever order they came.

    It is a sum of keyed hashes. Only a keyed hash of the sum is ever shown (`seal`): whoever has no key knows neither
    the sum nor what a record adds to it, and can make no other set with the same one.
    """

    __slots__ = ("_key", "_sum", "count")

    def __init__(self, key: bytes, total: int, count: int) -> None:
        self._key = key
        self._sum = total
        self.count = count
        """Of the records."""

    def changed(self, before: bytes | None, after: bytes | None) -> Digest:
        """The digest with one record put in another's place; None: there is none."""
        total = (self._sum - self._of(before) + self._of(after)) % 2**256
        return Digest(self._key, total, self.count - (before is not None) + (after is not None))

    def _of(self, raw: bytes | None) -> int:
        if raw is None:
            return 0
        # The signature is the record's, and its place's: two of the same are the same.
        return int.from_bytes(hashlib.blake2b(raw[:OVERHEAD_BYTES], key=self._key, digest_size=32).digest(), "little")

    def seal(self) -> bytes:
        """What may be shown of it."""
        whole = self._sum.to_bytes(32, "little") + self.count.to_bytes(8, "little")
        return hashlib.blake2b(whole, key=self._key, person=b"sum", digest_size=32).digest()
