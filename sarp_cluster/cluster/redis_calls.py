"""Calls of Redis, each within its time and with our errors; and what a failed one means."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import (
    AuthenticationError,
    ExecAbortError,
    RedisError,
    ResponseError,
    WatchError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from sarp_cluster import limits
from sarp_cluster.errors import MembershipError, RecordsRejectedError

TIMEOUT_S: Final = limits.MEMBERSHIP_TIMEOUT_MS / 1000
WRONG_TYPE: Final = "WRONGTYPE"


class RedisCalls:
    """A client, used within `redis_call`."""

    def __init__(self, client: Redis) -> None:
        self._redis = client

    async def one(self, *words: Any) -> Any:  # noqa: ANN401  # what the command answers
        """One command's answer."""
        return (await self.read(words))[0]

    async def read(self, *commands: tuple[Any, ...]) -> list[Any]:
        """The answers to commands that are sent at once. They may be sent twice: the first connection that is used
        after Redis was restarted is not there any more. Raises RecordsRejectedError for a key of another type."""
        try:
            return await self._read(commands)
        except RedisConnectionError:
            return await self._read(commands)

    async def _read(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        async with self.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            try:
                return list(await pipe.execute())
            except ResponseError as error:
                reject_wrong_type(error)
                raise

    @asynccontextmanager
    async def pipeline(self, *, transaction: bool = True) -> AsyncIterator[Pipeline]:
        """Commands over one connection, which is not used again when they do not all end well."""
        pipe = self._redis.pipeline(transaction=transaction)
        try:
            yield pipe
        except BaseException:  # whatever it is, cancellation too: it is raised
            pipe.watching = False
            if pipe.connection is not None:
                await pipe.connection.disconnect(nowait=True)
            raise
        finally:
            await pipe.reset()  # type: ignore[no-untyped-call]

    async def take_away(self, key: str, content: bytes) -> None:
        """Delete a key if it holds this."""
        async with self._redis.pipeline() as pipe:
            await pipe.watch(key)
            if await pipe.get(key) == content:
                pipe.multi()  # type: ignore[no-untyped-call]
                pipe.execute_command("DEL", key)
                with contextlib.suppress(WatchError):
                    await pipe.execute()

    async def close(self) -> None:
        """Let go of the connections, those to sentinels, too."""
        pool = self._redis.connection_pool
        await self._redis.aclose()
        if isinstance(pool, SentinelConnectionPool):
            for sentinel in pool.sentinel_manager.sentinels:
                await sentinel.aclose()


@asynccontextmanager
async def redis_call(what: str) -> AsyncIterator[None]:
    """Within the time that a call has, and with our errors."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise MembershipError(f"membership: {what}: Redis does not answer in time") from error
    except AuthenticationError as error:
        raise MembershipError(f"membership: {what}: Redis does not let us in: {error}") from error
    except (RedisError, OSError) as error:
        reject_wrong_type(error)
        kind = "cannot be reached" if isinstance(error, RedisConnectionError | OSError) else "refuses"
        raise MembershipError(f"membership: {what}: Redis {kind}: {error}") from error


def reject_wrong_type(error: Exception) -> None:
    """Raise RecordsRejectedError if a key turned out to be of another type than ours are."""
    if isinstance(error, ResponseError) and WRONG_TYPE in str(error):
        raise RecordsRejectedError(f"membership: a key of ours holds what we never put there: {error}") from error


def not_done(error: BaseException) -> bool:
    """Is it certain that a transaction was not done, nor will be? Redis has said so."""
    if isinstance(error, WatchError):  # also said of a connection that was lost meanwhile
        return not isinstance(error.__context__, RedisConnectionError | RedisTimeoutError | OSError)
    return isinstance(error, ExecAbortError) or isinstance(error.__cause__, ExecAbortError)
