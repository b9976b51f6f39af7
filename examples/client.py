"""A client in 20 lines: `sarp up` in one terminal, `python examples/client.py` in another."""

import asyncio
import sys

from sarp_cluster.client import AsyncClient

PROMPT = list(range(1_000))  # token IDs, as an engine's tokenizer makes them


async def main(url: str) -> None:
    """Nobody holds the prompt; then a worker does, and is found."""
    async with AsyncClient(url) as client:
        namespace = await client.namespace("llama-3.1-8b")
        print("before:", (await client.match(namespace, tokens=PROMPT)).matched_tokens, "tokens")
        await client.register_worker("gpu-node-1")
        async with client.writer("gpu-node-1") as writer:
            await writer.insert(namespace, tokens=PROMPT)
        found = await client.match(namespace, tokens=PROMPT, deadline_ms=1_000)
        print("after:", found.matched_tokens, "tokens, held by", [one.worker for one in found.workers])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7100"))
