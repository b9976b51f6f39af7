"""Publishes BlockStored events as vLLM does, for sequences of tokens on stdin (one a line, u32 little-endian, hex).

Runs in the environment that has Dynamo: needs pyzmq and msgpack, and nothing of ours.
"""

import struct
import sys
import time
import zlib

import msgpack  # type: ignore[import-untyped]
import zmq

port, block_tokens = int(sys.argv[1]), int(sys.argv[2])
socket = zmq.Context().socket(zmq.PUB)
socket.setsockopt(zmq.SNDHWM, 0)
socket.bind(f"tcp://127.0.0.1:{port}")
time.sleep(2)  # whoever subscribes has to be there first
for number, line in enumerate(sys.stdin):
    data = bytes.fromhex(line.strip())
    tokens = list(struct.unpack(f"<{len(data) // 4}I", data))
    blocks = len(tokens) // block_tokens
    # Any hashes will do, as long as they are chained: the indexer makes its own of the tokens.
    hashes, before = [], 0
    for block in range(blocks):
        part = data[4 * block_tokens * block : 4 * block_tokens * (block + 1)]
        before = (zlib.crc32(part, before & 0xFFFFFFFF) << 31) ^ (zlib.adler32(part) << 8) ^ block
        hashes.append(before)
    event = ["BlockStored", hashes, None, tokens, block_tokens, None, "GPU"]
    payload = msgpack.packb([time.time(), [event], 0])
    socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
    time.sleep(0.002)
while True:
    time.sleep(1)
