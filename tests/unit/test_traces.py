"""Trace readers: what they read, in which order, and how they refuse files that are not sound."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard

from sarp_cluster.errors import BadRequestError, InvariantViolationError, TraceError
from sarp_cluster.replay.request import Request
from sarp_cluster.replay.token_trace import parse_ktrc
from sarp_cluster.replay.traces import open_trace, unpack

SAMPLE = Path(__file__).parents[2] / "examples" / "sample"
MINT = SAMPLE / "mint_codeact.ktrc.zst"
CODING = SAMPLE / "coding_agent_blocks.jsonl.gz"
MOONCAKE = SAMPLE / "mooncake_conversation.jsonl.gz"
ALL = sorted(SAMPLE.glob("*.*z*"))


def last_token_ids(tokens: bytes, block_tokens: int = 16) -> bytes:
    """Stands in for hashing where only positions matter: a block's ID is its last token."""
    array = np.frombuffer(tokens, "<u4")
    full = len(array) // block_tokens * block_tokens
    return array[block_tokens - 1 : full : block_tokens].astype("<u8").tobytes()


def no_hashing(tokens: bytes) -> bytes:
    raise AssertionError("a trace of block IDs must not hash")


def ids(packed: bytes) -> list[int]:
    return list(memoryview(packed).cast("Q"))


def ktrc(
    sessions: Iterable[tuple[list[int], list[int], list[int]]],
    *,
    magic: bytes = b"KTRC0001",
    vocabulary: int = 32_000,
    turns: int | None = None,
) -> bytes:
    """An unpacked KTRC file of (tokens, context ends, output ends)."""
    tokens, contexts, outputs = (list(column) for column in zip(*sessions, strict=True))
    turn_count = sum(map(len, contexts)) if turns is None else turns
    raw = struct.pack("<8sIIQQ", magic, vocabulary, len(tokens), turn_count, sum(map(len, tokens)))
    raw += np.array([len(c) for c in contexts], "<u4").tobytes()
    raw += np.array([len(t) for t in tokens], "<u4").tobytes()
    raw += np.array(list(chain(*contexts)), "<u4").tobytes()
    raw += np.array(list(chain(*outputs)), "<u4").tobytes()
    return raw + np.array(list(chain(*tokens)), "<u2").tobytes()


def write(path: Path, contents: bytes | list[dict[str, object]]) -> Path:
    """Write raw bytes, or rows as JSON lines, plain."""
    if isinstance(contents, list):
        contents = "".join(json.dumps(row) + "\n" for row in contents).encode()
    path.write_bytes(contents)
    return path


class TestTokenTraces:
    def test_requests_come_turn_by_turn_over_all_sessions_in_file_order(self, tmp_path: Path) -> None:
        raw = ktrc([(list(range(48)), [16], [48]), (list(range(80)), [20, 60], [40, 80]), ([7] * 9, [3, 6], [5, 9])])
        trace = open_trace(write(tmp_path / "t.ktrc", raw))
        requests = list(trace.requests(last_token_ids))
        assert [(r.session, r.context_tokens) for r in requests] == [(0, 16), (1, 20), (2, 3), (1, 60), (2, 6)]
        assert trace.request_count == len(requests)

    def test_a_turn_matches_its_context_and_inserts_context_and_answer(self, tmp_path: Path) -> None:
        raw = ktrc([(list(range(80)), [20, 60], [40, 80])])
        one, two = open_trace(write(tmp_path / "t.ktrc", raw)).requests(last_token_ids)
        assert (ids(one.context), ids(one.sequence), one.first) == ([15], [15, 31], 0)
        assert (ids(two.context), ids(two.sequence), two.first) == ([15, 31, 47], [15, 31, 47, 63, 79], 2)

    def test_a_context_shorter_than_a_block_is_an_empty_request(self, tmp_path: Path) -> None:
        (request,) = open_trace(write(tmp_path / "t.ktrc", ktrc([([1] * 9, [3], [9])]))).requests(last_token_ids)
        assert (request.context, request.sequence, request.context_tokens) == (b"", b"", 3)

    def test_each_session_is_hashed_once(self) -> None:
        calls = 0

        def counting(tokens: bytes) -> bytes:
            nonlocal calls
            calls += 1
            return last_token_ids(tokens)

        trace = open_trace(MINT)
        assert sum(1 for _ in trace.requests(counting)) == trace.request_count > calls == trace.session_count

    def test_the_first_insert_position_is_what_the_session_inserted_before(self) -> None:
        held: dict[int, int] = {}
        for request in open_trace(MINT).requests(last_token_ids):
            assert request.first == held.get(request.session, 0)
            held[request.session] = request.sequence_blocks

    def test_other_block_sizes_cut_the_same_tokens(self, tmp_path: Path) -> None:
        raw = ktrc([(list(range(80)), [20], [80])])
        trace = open_trace(write(tmp_path / "t.ktrc", raw), block_tokens=32)
        (request,) = trace.requests(lambda tokens: last_token_ids(tokens, 32))
        assert (trace.block_tokens, ids(request.sequence)) == (32, [31, 63])

    def test_a_hash_function_of_another_block_size_is_noticed(self, tmp_path: Path) -> None:
        trace = open_trace(write(tmp_path / "t.ktrc", ktrc([(list(range(80)), [20], [80])])), block_tokens=32)
        with pytest.raises(InvariantViolationError, match="one ID for each full block"):
            next(trace.requests(last_token_ids))

    def test_limit_cuts_the_number_of_requests(self) -> None:
        assert sum(1 for _ in open_trace(MINT).requests(last_token_ids, limit=5)) == 5

    @pytest.mark.parametrize(
        ("raw", "complaint"),
        [
            (b"KTRC0001", "too few for a KTRC header"),
            (ktrc([([1, 2], [1], [2])], magic=b"KTRC0002"), "the magic is b'KTRC0002'"),
            (ktrc([([1, 2], [1], [2])])[:-1], "tokens take 52"),
            (ktrc([([1, 2], [1], [2])]) + b"x", "tokens take 52"),
            (ktrc([([1, 2], [1], [2])], turns=2**60), "turns and 2 tokens"),
            (ktrc([([1, 2], [], []), ([1, 2, 3, 4], [1, 3], [2, 4])]), "session 0 has no turns"),
            (ktrc([([1, 2], [0], [2])]), "session 0: the ends of turn 0 do not grow"),
            (ktrc([([1, 2], [1], [2]), ([1] * 9, [1, 3], [3, 9])]), "session 1: the ends of turn 1 do not grow"),
            (ktrc([([1] * 9, [8, 9], [8, 9])]), "session 0: the ends of turn 0 do not grow"),
            (ktrc([([1] * 9, [1], [8])]), "session 0 has 9 tokens, its last turn ends at 8"),
            (ktrc([([1, 5], [1], [2])], vocabulary=5), "token ID 5 is not below the vocabulary size 5"),
        ],
    )  # fmt: skip
    def test_an_unsound_file_is_refused_by_name_and_reason(self, tmp_path: Path, raw: bytes, complaint: str) -> None:
        path = write(tmp_path / "bad.ktrc", raw)
        with pytest.raises(TraceError, match=complaint) as caught:
            open_trace(path)
        assert str(path) in str(caught.value)

    def test_session_counts_that_do_not_add_up_are_refused(self, tmp_path: Path) -> None:
        raw = bytearray(ktrc([([1, 2], [1], [2])]))
        raw[32:36] = struct.pack("<I", 7)  # turns of session 0
        with pytest.raises(TraceError, match="have 7 turns, the header says 1"):
            open_trace(write(tmp_path / "turns.ktrc", bytes(raw)))
        raw[32:40] = struct.pack("<II", 1, 7)  # its tokens
        with pytest.raises(TraceError, match="have 7 tokens, the header says 2"):
            open_trace(write(tmp_path / "tokens.ktrc", bytes(raw)))


class TestCodingAgentTraces:
    ROWS: list[dict[str, object]] = [
        {"s": 0, "a": 0, "t": 0.0, "in": 200, "out": 1, "k": 0, "b": [[0, 2], [9, 1]]},
        {"s": 0, "a": 1, "t": 0.0, "in": 64, "out": 1, "k": 0, "b": [[0, 1]]},
        {"s": 0, "a": 0, "t": 0.0, "in": 199, "out": 1, "k": 2, "b": [[20, 1]]},
        {"s": 1, "a": 0, "t": 0.0, "in": 70, "out": 1, "k": 0, "b": [[0, 1]]},
    ]

    def test_leading_ids_come_from_the_request_before_in_the_same_thread(self, tmp_path: Path) -> None:
        requests = list(open_trace(write(tmp_path / "c.jsonl", self.ROWS)).requests(no_hashing))
        assert [ids(r.context) for r in requests] == [[0, 1, 9], [0], [0, 1, 20], [0]]
        assert [r.first for r in requests] == [0, 0, 2, 0]
        assert [(r.session, r.thread) for r in requests] == [(0, 0), (0, 1), (0, 0), (1, 0)]
        assert all(r.sequence == r.context for r in requests)

    def test_smaller_blocks_number_the_pieces_of_each_block(self, tmp_path: Path) -> None:
        trace = open_trace(write(tmp_path / "c.jsonl", self.ROWS), block_tokens=32)
        requests = list(trace.requests(no_hashing))
        assert ids(requests[2].context) == [0, 1, 2, 3, 40, 41]
        assert requests[2].first == 4

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"k": 4}, "line 3: `k` is 4, but the request before in this thread had 3 blocks"),
            ({"k": -1}, "line 3: `k` is not a whole number"),
            ({"k": True}, "line 3: `k` is not a whole number"),
            ({"b": 3}, "`b` is not a list of runs"),
            ({"b": [[1]]}, r"run \[1\] in `b`"),
            ({"b": [[1, 0]]}, r"run \[1, 0\] in `b`"),
            ({"b": [[2**63, 1]]}, "in `b`"),
            ({"in": 999}, "3 blocks are not the full blocks of 999 tokens"),
            ({"s": 1}, "`k` is 2, but the request before in this thread had 0 blocks"),
        ],
    )  # fmt: skip
    def test_an_unsound_line_is_named(self, tmp_path: Path, change: dict[str, object], complaint: str) -> None:
        rows = [dict(row) for row in self.ROWS]
        rows[2] |= change
        with pytest.raises(TraceError, match=complaint):
            open_trace(write(tmp_path / "c.jsonl", rows))

    def test_a_session_that_comes_back_is_refused(self, tmp_path: Path) -> None:
        rows = [*self.ROWS, dict(self.ROWS[0])]
        with pytest.raises(TraceError, match="line 5: session 0 comes back"):
            open_trace(write(tmp_path / "c.jsonl", rows))


class TestMooncakeTraces:
    ROWS: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 2]},
        {"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [0, 5]},
    ]

    def test_each_line_is_its_own_session_and_keeps_its_partial_block(self, tmp_path: Path) -> None:
        requests = list(open_trace(write(tmp_path / "m.jsonl", self.ROWS)).requests(no_hashing))
        assert [(r.session, ids(r.context), r.first) for r in requests] == [(0, [0, 1, 2], 0), (1, [0, 5], 0)]

    def test_smaller_blocks_end_with_the_last_full_one(self, tmp_path: Path) -> None:
        trace = open_trace(write(tmp_path / "m.jsonl", self.ROWS), block_tokens=64)
        one, two = trace.requests(no_hashing)
        assert ids(one.context) == list(range(17))  # 1100 // 64
        assert ids(two.context) == [*range(8), *range(40, 48)]

    @pytest.mark.parametrize(
        ("row", "complaint"),
        [
            ({"input_length": 1100, "hash_ids": [0, 1]}, "line 1: 2 `hash_ids` are not the blocks of 1100 tokens"),
            ({"input_length": "x", "hash_ids": [0]}, "`input_length` is not a whole number"),
            ({"input_length": 5, "hash_ids": [-1]}, "`hash_ids` is not a list of whole numbers"),
            ({"input_length": 5, "hash_ids": "ab"}, "`hash_ids` is not a list of whole numbers"),
        ],
    )
    def test_an_unsound_line_is_named(self, tmp_path: Path, row: dict[str, object], complaint: str) -> None:
        with pytest.raises(TraceError, match=complaint):
            open_trace(write(tmp_path / "m.jsonl", [row]))


class TestFiles:
    @pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
    def test_the_format_is_told_by_content_not_by_name(self, tmp_path: Path, path: Path) -> None:
        as_named = open_trace(path)
        for number, contents in enumerate((unpack(path), gzip.compress(unpack(path), 1), path.read_bytes())):
            other = open_trace(write(tmp_path / f"anything{number}", contents))
            assert (type(other), other.request_count) == (type(as_named), as_named.request_count)

    @pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
    def test_the_sample_is_real_and_whole(self, path: Path) -> None:
        trace = open_trace(path)
        requests = list(trace.requests(last_token_ids))
        assert len(requests) == trace.request_count > 1_000
        assert len({r.session for r in requests}) == trace.session_count
        assert all(r.first <= r.sequence_blocks for r in requests)
        assert all(r.sequence.startswith(r.context) for r in requests)

    def test_a_second_pass_gives_the_same_requests(self) -> None:
        trace = open_trace(CODING)
        first: list[Request] = list(trace.requests(no_hashing, limit=500))
        assert first == list(trace.requests(no_hashing, limit=500))

    @pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
    @pytest.mark.parametrize("kept", [5, 20, 0.5, -1])
    def test_a_truncated_file_is_refused(self, tmp_path: Path, path: Path, kept: float) -> None:
        packed = path.read_bytes()
        short = packed[: int(kept * len(packed)) if kept == 0.5 else int(kept)]
        with pytest.raises(TraceError, match=path.name):
            open_trace(write(tmp_path / path.name, short))

    def test_damage_inside_a_packed_file_is_noticed(self, tmp_path: Path) -> None:
        packed = bytearray(MOONCAKE.read_bytes())
        packed[len(packed) // 2] ^= 0x10
        with pytest.raises(TraceError, match=r"damaged|not JSON|hash_ids"):
            open_trace(write(tmp_path / "m.jsonl.gz", bytes(packed)))

    @pytest.mark.parametrize(
        ("contents", "complaint"),
        [
            (b"", "neither"),
            (b"\n\n", "neither"),
            (b"\x00\xff garbage", "neither"),
            (b"[1, 2]\n", "neither"),
            (b'{"unknown": 1}\n', "neither"),
            (b"[" * 100_000, "neither"),
            (b'{"hash_ids": [1], "input_length": 5}\n{"hash_', "line 2 is not JSON"),
            (b'{"hash_ids": [1], "input_length": 5}\n[]', "line 2 is not a JSON object"),
            (zstandard.compress(b"KTRC0001") + b"more", "zstd frame"),
            (zstandard.ZstdCompressor(write_content_size=False).compress(b"KTRC0001"), "does not tell its"),
            (gzip.compress(b""), "neither"),
        ],
    )  # fmt: skip
    def test_what_is_not_a_trace_is_refused(self, tmp_path: Path, contents: bytes, complaint: str) -> None:
        with pytest.raises(TraceError, match=complaint):
            open_trace(write(tmp_path / "x.ktrc.zst", contents))

    def test_a_frame_that_would_unpack_to_more_than_the_bound_is_not_unpacked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sarp_cluster.limits.TRACE_BYTES_MAX", 1_000)
        for packed in (zstandard.compress(bytes(10_000)), gzip.compress(bytes(10_000)), bytes(10_000)):
            with pytest.raises(TraceError, match="more than 1000"):
                unpack(write(tmp_path / "bomb", packed))

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"nothing\.ktrc: No such file"):
            open_trace(tmp_path / "nothing.ktrc")

    @pytest.mark.parametrize(
        ("path", "block_tokens"), [(MINT, 0), (MINT, 5_000), (CODING, 48), (CODING, 128), (MOONCAKE, 0)]
    )
    def test_an_impossible_block_size_is_refused(self, path: Path, block_tokens: int) -> None:
        with pytest.raises(BadRequestError, match="block_tokens") as caught:
            open_trace(path, block_tokens=block_tokens)
        assert caught.value.field == "block_tokens"

    def test_ends_of_the_sample_grow_within_each_session(self) -> None:
        sessions = parse_ktrc(unpack(MINT), MINT)
        at = 0
        for turns in sessions.turns[:200].tolist():
            ends = np.stack([sessions.context_ends, sessions.output_ends], 1)[at : at + turns].ravel().tolist()
            assert all(one < two for one, two in pairwise([0, *ends]))
            at += turns
