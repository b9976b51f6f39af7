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

MERGE_POSTINGS_A_STEP: Final = 1 << 14
"""Postings that a merge moves, in its helper thread and without the interpreter's lock, before it pauses."""

MERGE_PAUSE_S: Final = 50e-6
"""What the helper thread that merges and writes runs sleeps after some half a millisecond's work. The scheduler may put
it on the CPU of the loop's thread, though another is idle, and without a pause takes it off only at a tick: after up to
4 ms where there are 250 a second."""

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

# --- the cluster ------------------------------------------------------------------------------------------------------

SHARDS_MAX: Final = 1_024
"""Shards of one cluster; there are 4,096 slots."""

SPLITS_MAX: Final = 65_536
"""Entries of the split table: each is a hot prefix."""

STRETCHES_MAX: Final = REQUEST_BLOCKS_MAX // SEGMENT_BLOCKS_MAX
"""Stretches of one sequence: each has at least one segment's blocks."""

LEASE_MS: Final = 60_000
"""For how long a shard may acknowledge changes after it was last heard by a coordinator."""

LEASE_MARGIN_MS: Final = 5_000
"""Left of a lease when the shard stops acknowledging: longer than any pause within one acknowledgement that is
tolerated, and than clocks drift apart within a lease."""

LEADER_LEASE_MS: Final = 10_000
"""For how long a coordinator leads after it last said so."""

MEMBERSHIP_TIMEOUT_MS: Final = 2_000
"""A call of the membership backend that takes longer has failed."""

MEMBERSHIP_LOAD_TIMEOUT_MS: Final = 60_000
"""Reading all records takes no longer: a million entries take some twenty seconds."""

MEMBERSHIP_MAP_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of a slot map's record: 65,536 splits with 14 bytes each, 1,024 names with 258, 4,096 owners with 2."""

MEMBERSHIP_RECORD_BYTES_MAX: Final = 16 * 1024
"""Bytes of any other record: it has at most some ten names."""

MEMBERSHIP_RECORDS_MAX: Final = 4_000_000
"""Entries of the registry that a backend is believed to hold: namespaces, workers, as many tenants, and a reserve."""

MEMBERSHIP_ENTRIES_A_WRITE: Final = 512
"""Entries of the registry that are written at once."""

HEARTBEAT_MS: Final = 1_000
"""From one heartbeat of a shard or router to the next."""

PROBE_MS: Final = 1_000
"""From one probe of a shard to the next; one that is not answered within that time has failed."""

SHARD_SILENT_MS: Final = 2_500
"""A shard that was not heard for so long is suspect: two heartbeats were lost."""

PROBES_FAILED_MAX: Final = 3
"""Failed probes in a row after which a suspect shard is down."""

SNAPSHOT_DUE_LOG_BYTES: Final = 8 * 1024 * 1024
"""Bytes of the log behind its last snapshot from which a shard is told to take one, when no other shard is at it."""

SNAPSHOT_DUE_AGE_MS: Final = 600_000
"""Age of its last snapshot from which a shard is told to take one, if its log has grown at all."""

SNAPSHOT_TIMEOUT_MS: Final = 60_000
"""A snapshot that a shard was told to take and that takes longer keeps others from theirs no more."""

MATCH_DEADLINE_MS: Final = 50
"""Deadline of a match that names none."""

INSERT_DEADLINE_MS: Final = 2_000
"""Deadline of a change that names none."""

DEADLINE_MS_MAX: Final = 600_000
"""Longest deadline that may be asked for."""

BATCH_ITEMS_MAX: Final = 256
"""Items of one batch."""

BODY_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of a request's body: 131,072 blocks as token IDs take 8 MiB."""

BATCH_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes of the body of a batch, and of a frame."""

HEADER_BYTES_MAX: Final = 8_190
"""Bytes of one header line of an HTTP request, and of the request line."""

CONNECTIONS_MAX: Final = 4_096
"""Connections that one node serves at once on each wire; more are closed at once."""

REQUESTS_A_CONNECTION_MAX: Final = 1_024
"""Requests in flight on one stream; the node reads no further until some are answered."""

SEND_BUFFER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Answers waiting for a peer that does not read; one with more is dropped."""

HEADER_TIMEOUT_MS: Final = 10_000
"""A connection that has not sent a whole request head, or hello, by then is closed."""

BODY_TIMEOUT_MS: Final = 30_000
"""A request's body, or a frame, that has not come by then is given up with its connection."""

IDLE_TIMEOUT_MS: Final = 75_000
"""A connection of the HTTP wire on which nothing happened for so long is closed."""

STREAM_IDLE_TIMEOUT_MS: Final = 300_000
"""The same for the stream, whose clients send a ping when they have nothing else to say."""

CONNECT_TIMEOUT_MS: Final = 1_000
"""A connection to another node that is not made by then has failed."""

RECONNECT_MS_MAX: Final = 200
"""Longest pause before a lost connection to another node is tried again."""

SHARD_RECONNECT_MS_MAX: Final = 100
"""The same from a router to a shard: until it has found the shard that is back, its answers are shorter."""

WORKERS_LISTED_MAX: Final = 65_536
"""Workers that a request may name, or a list has."""

ROUTERS_MAX: Final = 4_096
"""Routers of one cluster."""

ROUTER_FORGOTTEN_MS: Final = 60_000
"""A router that was not heard for so long makes room for others."""

CHANGES_WAITING_MAX: Final = 4_096
"""Changes without a key that wait for their number; more are refused."""

CHANGES_A_BATCH: Final = 256
"""Changes without a key that are numbered, kept and spread together."""

EVENTS_KEPT: Final = 4_096
"""Events of the timeline that a coordinator remembers."""

EVENT_TEXT_MAX: Final = 1_000
"""Characters of an event's text; the rest is cut off."""

CREDENTIALS_MAX: Final = 65_536
"""Credentials of one file."""

CHANGE_TIMEOUT_MS: Final = 5_000
"""How long the coordinator waits for each shard to have a change durably, before it names it as missing."""

# --- clients ----------------------------------------------------------------------------------------------------------

CONTROL_DEADLINE_MS: Final = 10_000
"""Deadline of a client's call that is neither a match nor a change of blocks and names none: longer than
CHANGE_TIMEOUT_MS, after which a node says which shards are missing."""

RETRIES_A_REQUEST: Final = 0.1
"""What each request of a client adds to its retry budget, of which each retry takes 1: in the long run retries add at
most a tenth to the requests, so that a cluster that fails is not asked twice as much."""

RETRIES_SAVED_MAX: Final = 10.0
"""The most that a retry budget holds, and what it begins with."""

WRITER_PAUSE_MS_MIN: Final = 10
"""Pause before a writer sends a change for the second time. It doubles from one try to the next."""

WRITER_PAUSE_MS_MAX: Final = 1_000
"""The longest such pause, unless the cluster asks for more; also what a writer waits when the retry budget is spent."""

WRITER_QUEUE_MAX: Final = 4 * BATCH_ITEMS_MAX
"""Changes that wait in a writer; who adds one more waits for room."""

WRITER_BATCH_BYTES_MAX: Final = BATCH_BYTES_MAX // 4
"""Bytes of block IDs that a writer sends in one batch; one change alone may have more."""

CLIENT_CONNECTIONS_MAX: Final = 256
"""Connections that a client keeps to one router by HTTP; calls beyond that wait for one."""

ADDRESSES_MAX: Final = 64
"""Addresses that a client may be given."""
