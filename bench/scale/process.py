"""What a process that comes back says of itself. Imports little: its own start is part of what is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

SECRET: Final = b"stores that benchmarks make"
"""Keys the block IDs of all stores that benchmarks write in bulk."""


def resident_bytes_max(process: int | str = "self") -> int:
    """The most memory a process has had."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def report(*, started: int, opening: int, ready: int, answered: int) -> str:
    """The measurement as JSON. Times are of the monotonic clock, in ns."""
    return json.dumps(
        {
            "open_s": (answered - opening) / 1e9,
            "process_s": (answered - started) / 1e9,
            "query_us": (answered - ready) / 1e3,
            "resident_bytes": resident_bytes_max(),
        }
    )
