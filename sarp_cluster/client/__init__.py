"""The SDK: `AsyncClient` and `Client` (docs/protocol.md has what they speak; examples/client.py is one in 20 lines)."""

from sarp_cluster.client.async_client import AsyncClient
from sarp_cluster.client.errors import CallError, DeadlineError, NotNowError, RefusedError, UnreachableError
from sarp_cluster.client.requests import Namespace, insert_request, match_request, remove_request
from sarp_cluster.client.sync_client import Client, Writer
from sarp_cluster.client.writer import WorkerWriter

__all__ = [
    "AsyncClient",
    "CallError",
    "Client",
    "DeadlineError",
    "Namespace",
    "NotNowError",
    "RefusedError",
    "UnreachableError",
    "WorkerWriter",
    "Writer",
    "insert_request",
    "match_request",
    "remove_request",
]
