from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sarp_cluster.core.posting_run import PostingRun

Words = NDArray[np.uint32] | memoryview[int]
Bytes = NDArray[np.uint8] | memoryview[int]

class RowFile(Protocol):
    """What a run file says of a chunk of rows that cannot be read."""

    def row_failure(self, chunk: int, error: int) -> Exception: ...

class RowMerge:
    def add_memory(self, slots: Words, rows: Bytes) -> None: ...
    def add_file(self, file: RowFile, descriptor: int, offset: int, entries: Words, checksums: Words) -> None: ...

class RunPacker:
    def postings(self, run: PostingRun, first: int) -> int: ...
    def rows(self, merge: RowMerge) -> int: ...
    @property
    def data(self) -> memoryview: ...
    @property
    def checksums(self) -> bytes: ...
    @property
    def entries(self) -> bytes: ...
