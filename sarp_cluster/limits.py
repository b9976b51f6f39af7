"""Every bound, in one module. Input over a bound is refused with an error that names the field and the bound.

Units are in the names. A bound that follows from another is checked where it is defined.
"""

from typing import Final

SEGMENT_BLOCKS_MAX: Final = 64
"""Blocks a segment may hold: the blocks that a worker holds of one segment are one 64-bit mask."""

REQUEST_BLOCKS_MAX: Final = 131_072
"""Blocks of one match or insert. The longest real context we have seen has 55,896 blocks of 16 tokens."""

BLOCK_TOKENS_MAX: Final = 4_096
"""Tokens a block. Engines use 16 to 512."""

REQUEST_TOKENS_MAX: Final = 16 * REQUEST_BLOCKS_MAX
"""Token IDs of one request (4 bytes each)."""

TRACE_BYTES_MAX: Final = 2**30
"""Bytes of an unpacked trace file that is to be replayed. The largest we have takes 60 MB."""

REPLAY_READ_AHEAD: Final = 32
"""Requests a replay reads ahead for each one in flight, to find some whose session is not busy."""

NAMESPACES_MAX: Final = 1_000_000
"""Namespaces of one index."""

WORKERS_MAX: Final = 1_000_000
"""Workers (instance and dp_rank) that one index has ever seen."""

SEGMENTS_MAX: Final = 2**31 - 4097
"""Segments of one index: a posting names its segment in 31 bits, the top bit marks a removal and the lowest 4,096
values are the headers of posting lists."""

GENERATION_MAX: Final = 2**32 - 1
"""Highest generation of a worker (32 bits on disk)."""

SEQ_MAX: Final = 2**63 - 1
"""Highest sequence number of a worker's changes."""

DP_RANK_MAX: Final = 2**16 - 1
"""Highest data-parallel rank."""

NAME_BYTES_MAX: Final = 255
"""UTF-8 bytes of a name: an instance id, a tenant, a model, a LoRA adapter, a salt."""

LOCATION_RUNS_MAX: Final = 16_383
"""Location runs of one segment. A record's length is counted in 8-byte units in 16 bits, so 512 KiB at most; the
paged record for blocks that thousands of workers hold comes with the life of a block."""

CANDIDATES_EXAMINED_MAX: Final = 16
"""Candidates that one step of the candidate walk ranks at once (design §4: ties go to the most recently registered
of the first 16 of the range)."""

LOG_FILE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes after which a log file is closed and the next one begun."""

RECLAIM_RATIO_MAX: Final = 100
"""Highest bytes of all log files to live ones that may be allowed."""

RECLAIM_BYTES_PER_SECOND_MIN: Final = 65_536
"""Slower than this a step of reclaiming would be due every few seconds, and a file would take days."""

LOG_TAIL_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of the log that may wait in memory for a write before an insert has to wait for the disk."""

DUMP_LINE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of one line of a dump. Ours are at most some 4 MiB: 33 segments with 17 bytes a block, and twice
LOCATION_RUNS_MAX locations with some 100 bytes each."""

READ_GAP_BYTES_MAX: Final = 512
"""Two records of one wave are read by one call when at most this many bytes lie between them."""

LOCATIONS_ANSWER_MAX: Final = 65_536
"""Locations after which an answer with detail "blocks" ends, behind a whole block: it is made in one go, at some
microseconds each, and thousands of workers may hold each of REQUEST_BLOCKS_MAX blocks."""

INSERT_ATTEMPTS_MAX: Final = 64
"""Times an insert starts again because the index changed while it waited for the disk. Each attempt keeps the records
already read, so that it waits only for what is new."""

BACKFILL_SEGMENTS_A_STEP: Final = 32
"""Segments that one step of the back-fill reads and registers before it yields to foreground work."""

MERGE_POSTINGS_A_STEP: Final = 1 << 20
"""Postings that a merge moves, in its helper thread and without the interpreter's lock, before it looks up."""

DIRECTORY_RUNS_MAX: Final = 6
"""Runs of the routing directory above which the newest are merged: each is asked in turn."""

RUNS_MERGED_MIN: Final = 4
"""Runs of a size that are merged into one."""

LOAD_A_STEP: Final = 16
"""Chunks of 64 KiB that one step of the warmer loads."""

WARM_PAUSE_MS: Final = 4
"""Pause between two steps of the warmer: at full speed it would keep the disk from those who wait for it."""

SCRUB_SEGMENTS_A_SECOND: Final = 10_000
"""How fast the scrub reads: some 6 MB a second of full segments, and a round of 1e9 blocks in half an hour."""

SCRUB_ROWS_A_STEP: Final = 8_192
"""Rows of the segment table that one step of the scrub looks through."""

PURGE_POSTINGS_A_STEP: Final = 16_384
"""Postings that one step of background work looks at for those of segments that are gone: about a millisecond."""

SCRUB_PAUSE_S: Final = 24 * 3_600
"""Seconds from the end of one round of the scrub to the next."""

FULL_RETRY_MS: Final = 500
"""How often work that found the disk full looks whether there is space again."""

ROWS_COPIED_A_STEP: Final = 2_048
"""Rows that one step of a snapshot copies before it yields."""

WORKERS_COPIED_A_STEP: Final = 1_024
"""Workers that one step of a snapshot copies before it yields."""

SNAPSHOT_LOG_BYTES_MAX: Final = 2**30
"""Bytes of the log from one snapshot to the next, at most: a restart replays them."""
