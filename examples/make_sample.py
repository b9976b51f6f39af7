"""Cuts the sample traces from the full ones: `python examples/make_sample.py SOURCE_DIR [TARGET_DIR]`.

Takes the first sessions of each file, whole (Mooncake, which names no sessions: the first lines). Nothing is drawn at
random, so the same sources and the same zstandard version give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import zstandard

from sarp_cluster.replay.token_trace import HEADER, MAGIC, TokenSessions, parse_ktrc
from sarp_cluster.replay.traces import unpack

MINT_SESSIONS = 2_000
SHAREGPT_SESSIONS = 700
SERVICE_CHAT_SESSIONS = 1_000
CODING_AGENT_SESSIONS = 160
MOONCAKE_REQUESTS = 4_000


def main() -> None:
    """Write the four sample files, and the one of the chaos tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="directory of the full traces")
    parser.add_argument("target", type=Path, nargs="?", default=Path(__file__).parent / "sample")
    arguments = parser.parse_args()
    source, target = arguments.source, arguments.target
    target.mkdir(parents=True, exist_ok=True)
    for name, count in (("mint_codeact", MINT_SESSIONS), ("sharegpt_short", SHAREGPT_SESSIONS)):
        path = source / f"{name}.ktrc.zst"
        packed = ktrc(first_sessions(parse_ktrc(unpack(path), path), count))
        (target / path.name).write_bytes(packed)
    # By itself, since its licence is another one.
    path = source / "service_chat.ktrc.zst"
    packed = ktrc(first_sessions(parse_ktrc(unpack(path), path), SERVICE_CHAT_SESSIONS))
    (Path(__file__).parents[1] / "tests" / "chaos" / "traces" / path.name).write_bytes(packed)
    path = source / "coding_agent_blocks.jsonl.gz"
    lines = unpack(path).splitlines(keepends=True)
    # Sessions are numbered in file order, so the first ones end where the next number begins.
    end = next(i for i, line in enumerate(lines) if line.startswith(b'{"s":%d,' % CODING_AGENT_SESSIONS))
    (target / path.name).write_bytes(gzip.compress(b"".join(lines[:end]), mtime=0))
    path = source / "mooncake_conversation.jsonl.gz"
    lines = unpack(path).splitlines(keepends=True)
    (target / path.name).write_bytes(gzip.compress(b"".join(lines[:MOONCAKE_REQUESTS]), mtime=0))


def first_sessions(sessions: TokenSessions, count: int) -> TokenSessions:
    """The first `count` sessions of a token trace."""
    turns = int(sessions.turns[:count].sum(dtype=np.int64))
    tokens = int(sessions.lengths[:count].sum(dtype=np.int64))
    return TokenSessions(
        vocabulary=sessions.vocabulary,
        turns=sessions.turns[:count],
        lengths=sessions.lengths[:count],
        context_ends=sessions.context_ends[:turns],
        output_ends=sessions.output_ends[:turns],
        tokens=sessions.tokens[:tokens],
    )


def ktrc(sessions: TokenSessions) -> bytes:
    """A packed KTRC file."""
    header = HEADER.pack(
        MAGIC, sessions.vocabulary, len(sessions.turns), len(sessions.context_ends), len(sessions.tokens)
    )
    columns = (sessions.turns, sessions.lengths, sessions.context_ends, sessions.output_ends, sessions.tokens)
    raw = header + b"".join(column.tobytes() for column in columns)
    parameters = zstandard.ZstdCompressionParameters.from_level(22, window_log=27, write_content_size=True)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(raw)


if __name__ == "__main__":
    main()
