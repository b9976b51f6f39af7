"""Namespaces of one index: which sequences may share blocks, and the key that keeps them apart."""

from __future__ import annotations

from collections.abc import Iterator

from sarp_cluster import limits
from sarp_cluster.core.block_id import NamespaceKey, xxh3_block_ids
from sarp_cluster.core.namespace import derive_namespace_key, key_check
from sarp_cluster.errors import BadRequestError, TooLargeError, UnknownNamespaceError
from sarp_cluster.storage.registry import NamespaceRecord
from sarp_cluster.storage.segment_store import SegmentStore
from sarp_cluster.types import HashProfile, NamespaceSpec


class IndexNamespace:
    """A namespace of an open index; see types.Namespace."""

    __slots__ = ("id", "key", "purges", "registry", "spec")

    def __init__(
        self, registry: NamespaceRegistry, number: int, spec: NamespaceSpec, key: NamespaceKey, purges: int
    ) -> None:
        self.registry = registry
        self.id = number
        self.spec = spec
        self.key = key
        self.purges = purges
        """How often its tenant had been purged when it was made."""

    def block_ids(self, token_ids: bytes) -> bytes:
        """Wire IDs (u64 little-endian) of the full blocks of `token_ids` (u32 little-endian), chained."""
        if self.spec.hash_profile is not HashProfile.XXH3:
            raise BadRequestError(
                f"token_ids: block IDs of the {self.spec.hash_profile} profile are made by the caller",
                field="token_ids",
            )
        return xxh3_block_ids(token_ids, self.spec.block_size, self.spec.lora, self.spec.salt)


class NamespaceRegistry:
    """All namespaces of one index, by what they are and by number."""

    def __init__(self, secret: bytes, store: SegmentStore) -> None:
        self._secret = secret
        self._store = store
        self._by_spec: dict[NamespaceSpec, IndexNamespace] = {}
        """The one that is in use: made after the last purge."""
        self._by_number: dict[int, IndexNamespace] = {}

    def __len__(self) -> int:
        """All there ever were: their numbers are 1 to this."""
        return len(self._by_number)

    def __iter__(self) -> Iterator[IndexNamespace]:
        """All namespaces in use, by number."""
        return iter(sorted(self._by_spec.values(), key=lambda namespace: namespace.id))

    def create(self, spec: NamespaceSpec, purges: int = 0) -> IndexNamespace:
        """The namespace of `spec`, made if it is new, or if its tenant was purged more often than it knows."""
        known = self._by_spec.get(spec)
        if known is not None and known.purges >= purges:
            return known
        for field in ("tenant", "model", "lora", "salt"):
            name = getattr(spec, field)
            if not isinstance(name, str) or len(name.encode()) > limits.NAME_BYTES_MAX:
                raise BadRequestError(
                    f"{field}: must be a string of at most {limits.NAME_BYTES_MAX} bytes", field=field
                )
        if not 1 <= spec.block_size <= limits.BLOCK_TOKENS_MAX:
            raise BadRequestError(
                f"block_size: {spec.block_size} is not in 1..{limits.BLOCK_TOKENS_MAX} tokens", field="block_size"
            )
        if not isinstance(spec.hash_profile, HashProfile):
            raise BadRequestError(
                f"hash_profile: {spec.hash_profile!r} is not one of {', '.join(HashProfile)}", field="hash_profile"
            )
        if len(self._by_number) >= limits.NAMESPACES_MAX:
            raise TooLargeError(f"namespace: the index holds its limit of {limits.NAMESPACES_MAX}", field="namespace")
        number = len(self._by_number) + 1
        key = derive_namespace_key(self._secret, spec, purges)
        self._store.put_namespace(*_record(number, spec, key, purges))
        return self._enter(number, spec, key, purges)

    def records(self) -> list[NamespaceRecord]:
        """All namespaces as records."""
        return [NamespaceRecord(*self.record(number)) for number in self._by_number]

    def record(self, number: int) -> tuple[int, tuple[str, ...], int, bytes]:
        """What the store is given of a namespace: its number, fields, block size and key check."""
        namespace = self._by_number[number]
        key = derive_namespace_key(self._secret, namespace.spec, namespace.purges)
        return _record(number, namespace.spec, key, namespace.purges)

    def restore(self, record: NamespaceRecord) -> None:
        """Enter a namespace that the log has."""
        tenant, model, lora, salt, profile, *purged = record.fields
        purges = int(purged[0]) if purged else 0
        spec = NamespaceSpec(
            tenant=tenant,
            model=model,
            lora=lora,
            salt=salt,
            block_size=record.block_size,
            hash_profile=HashProfile(profile),
        )
        key = derive_namespace_key(self._secret, spec, purges)
        if key_check(key) != record.key_check:
            raise BadRequestError("secret: not the one with which this store was made", field="secret")
        self._enter(record.number, spec, key, purges)

    def _enter(self, number: int, spec: NamespaceSpec, key: bytes, purges: int) -> IndexNamespace:
        namespace = self._by_number[number] = IndexNamespace(self, number, spec, NamespaceKey(key), purges)
        known = self._by_spec.get(spec)
        if known is None or known.purges < purges:
            self._by_spec[spec] = namespace
        return namespace

    def require(self, namespace: object) -> IndexNamespace:
        """The namespace, if it is one of this index."""
        if isinstance(namespace, IndexNamespace) and namespace.registry is self:
            return namespace
        raise UnknownNamespaceError("namespace: not one of this index; create it first", field="namespace")


def _record(number: int, spec: NamespaceSpec, key: bytes, purges: int) -> tuple[int, tuple[str, ...], int, bytes]:
    fields: tuple[str, ...] = (spec.tenant, spec.model, spec.lora, spec.salt, str(spec.hash_profile))
    if purges:
        fields = (*fields, str(purges))
    return number, fields, spec.block_size, key_check(key)
