"""Credentials: who may do what for which tenants (design §8).

A credential is a bearer token of at least 256 bits. Only its SHA-256 is kept; being random, it needs no slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from sarp_cluster import limits
from sarp_cluster.errors import BadRequestError, ForbiddenError, UnauthenticatedError
from sarp_cluster.wire.codec import JSON, decode
from sarp_cluster.wire.messages import Name
from sarp_cluster.wire.operations import SCOPES, Scope

TOKEN_BYTES: Final = 32
TOKEN_PREFIX: Final = "sarp_"  # noqa: S105  # what tokens begin with, so that scanners of leaked secrets know them
DEFAULT_TENANT: Final = "default"


class Credential(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One credential, as its file has it."""

    name: Name
    """For logs, and for the workers it owns."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Of its token, in hexadecimal."""
    tenants: Annotated[list[Name], Meta(min_length=1, max_length=limits.CREDENTIALS_MAX)] = msgspec.field(
        default_factory=lambda: [DEFAULT_TENANT]
    )
    scopes: Annotated[list[Scope], Meta(min_length=1, max_length=len(SCOPES))]


class CredentialFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of all credentials: JSON, for its owner only."""

    credentials: Annotated[list[Credential], Meta(max_length=limits.CREDENTIALS_MAX)]


class Principal:
    """Who asks: a credential and the tenant it asks for."""

    __slots__ = ("is_node", "name", "scopes", "tenant", "tenants")

    def __init__(self, name: str, tenants: Iterable[str], scopes: Iterable[Scope], tenant: str | None = None) -> None:
        self.name = name
        self.tenants = frozenset(tenants)
        self.scopes = frozenset(scopes)
        self.tenant = tenant
        """None: the credential has several, and the caller named none."""
        self.is_node = "node" in self.scopes
        """Is it another node, which has checked its own callers?"""

    def require(self, scope: Scope) -> None:
        """Raise ForbiddenError unless the credential has the scope."""
        if scope not in self.scopes:
            raise ForbiddenError(f"the credential {self.name!r} has not the scope {scope!r}")

    def for_tenant(self) -> str:
        """The tenant it asks for."""
        if self.tenant is None:
            raise BadRequestError("Sarp-Tenant: the credential has several tenants; name one", field="Sarp-Tenant")
        return self.tenant


def digest(token: str) -> str:
    """SHA-256 of a token, as credentials keep it."""
    return hashlib.sha256(token.encode()).hexdigest()


def make_token() -> str:
    """A new token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def read_credentials(raw: bytes) -> list[Credential]:
    """The credentials of a file. Raises BadRequestError naming the field."""
    credentials = decode(raw, CredentialFile, JSON).credentials
    for field in ("name", "sha256"):
        seen = [getattr(credential, field) for credential in credentials]
        if len(set(seen)) != len(seen):
            raise BadRequestError(f"credentials: two have the same {field}", field=field)
    for credential in credentials:
        for name in (credential.name, *credential.tenants):
            if len(name.encode()) > limits.NAME_BYTES_MAX:
                raise BadRequestError(
                    f"credentials: {name[:32]!r}… is over {limits.NAME_BYTES_MAX} bytes", field="name"
                )
    return credentials


class Authenticator:
    """Knows every credential. Without any, everybody may do everything for the default tenant."""

    def __init__(self, credentials: Iterable[Credential] = (), node_token: str | None = None) -> None:
        self._by_digest = {credential.sha256: credential for credential in credentials}
        self.open = not self._by_digest
        """No credentials are configured: only loopback is served, unless the operator insists."""
        if node_token is not None:
            node = Credential(name="node", sha256=digest(node_token), scopes=list(SCOPES))
            self._by_digest[node.sha256] = node
        self._anonymous = Principal("anonymous", [DEFAULT_TENANT], SCOPES, DEFAULT_TENANT)

    def authenticate(self, token: str, tenant: str = "") -> Principal:
        """Who presents this token ("": none) and asks for this tenant ("": the only one it has)."""
        credential = None
        if token:
            presented = digest(token)
            found = self._by_digest.get(presented)
            if found is not None and hmac.compare_digest(found.sha256, presented):
                credential = found
        if credential is None:
            if self.open and not token:
                if tenant not in ("", DEFAULT_TENANT):
                    raise ForbiddenError(f"Sarp-Tenant: without credentials there is only {DEFAULT_TENANT!r}")
                return self._anonymous
            raise UnauthenticatedError("credential: unknown" if token else "credential: none; send a bearer token")
        if tenant and tenant not in credential.tenants:
            raise ForbiddenError(f"Sarp-Tenant: not a tenant of the credential {credential.name!r}")
        if not tenant and len(credential.tenants) == 1:
            tenant = credential.tenants[0]
        return Principal(credential.name, credential.tenants, credential.scopes, tenant or None)


def bearer(header: str) -> str:
    """The token of an Authorization header; empty where there is none."""
    kind, _, token = header.partition(" ")
    if kind and kind.lower() != "bearer":
        raise UnauthenticatedError("Authorization: only Bearer is known")
    return token.strip()


def node_token(secret: bytes) -> str:
    """The token with which nodes of one cluster know each other, made of the cluster's secret."""
    return TOKEN_PREFIX + hashlib.blake2b(key=secret, person=b"sarp-node-token", digest_size=32).hexdigest()


def cluster_id(secret: bytes) -> str:
    """What tells a cluster from every other: made of its secret, so that all coordinators say the same."""
    return hashlib.blake2b(key=secret, person=b"sarp-cluster-id", digest_size=8).hexdigest()
