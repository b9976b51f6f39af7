"""The backends of membership that the conformance suite runs over, each behind the same few calls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

from sarp_cluster.cluster.embedded import EmbeddedMembership
from sarp_cluster.cluster.membership import Membership
from sarp_cluster.storage.record_file import RecordFile


class Backend(Protocol):
    """One set of records, which coordinators open one after the other."""

    async def open(self) -> Membership:
        """As a coordinator does that starts. Whoever opened it closes it."""


class Embedded:
    """Records in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def open(self) -> Membership:
        """See Backend."""
        file = await RecordFile.open(self._path)
        try:
            return await EmbeddedMembership.open(file)
        except BaseException:
            await file.close()
            raise


@asynccontextmanager
async def embedded(directory: Path) -> AsyncIterator[Backend]:
    """Records in a file of this directory."""
    yield Embedded(directory / "records")


class Factory(Protocol):
    """Makes a backend without records, and takes it away at the end."""

    def __call__(self, directory: Path) -> contextlib.AbstractAsyncContextManager[Backend]:
        """A new one, whose files are in `directory`."""


BACKENDS: Final[dict[str, Factory]] = {"embedded": embedded}
