"""How long a frontend's event loop waits while the tree of a large pool is made beside it.

python -m tests.bench.bench_loop_lag [--blocks 100000]
"""

import argparse
import asyncio
import random
import time

from kvmanager.protocol import At, BlocksPage
from services.kv.collect import merge, uncollected
from services.kv.tree import Tree

PAGE = 1024
AT = At("bench", 1)


def made_up(num_blocks: int) -> list[BlocksPage]:
    """Pages of a pool full of texts of some ten blocks each, beginning alike."""
    chance, hashes = random.Random(1), [bytes(32)]
    pages = []
    for first in range(0, num_blocks, PAGE):
        size = min(PAGE, num_blocks - first)
        own = [chance.randbytes(32) for _ in range(size)]
        parents = [hashes[-1] if chance.random() < 0.9 else chance.choice(hashes[-50:]) for _ in own]
        for index, digest in enumerate(own):
            parents[index] = hashes[-1] if index % 10 else parents[index]
            hashes.append(digest)
        tokens = tuple(chance.randbytes(64) for _ in own)
        columns = ((1,) * size, tuple(own), tuple(parents), tokens, (b"",) * size, (0,) * size, bytes(32))
        states = (bytes([3]) * size, bytes(size), (16,) * size, (1.0,) * size, bytes(size))
        pages.append(BlocksPage(1, AT, num_blocks, 16, 1, first, *states, *columns))
    return pages


async def measure(num_blocks: int) -> None:
    pages, lags = made_up(num_blocks), [0.0]

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            lags.append((time.monotonic() - began) * 1e3 - 1)

    watching = asyncio.create_task(watch())
    for name in ("nothing", "merge", "tree"):
        lags[:], began = [0.0], time.monotonic()
        with uncollected():
            if name == "merge":
                contents = (await asyncio.to_thread(merge, pages, [], [], AT)).contents
            elif name == "tree":
                tree = await asyncio.to_thread(Tree, contents)
            else:
                await asyncio.sleep(0.5)
        took = (time.monotonic() - began) * 1e3
        print(f"{name:<8}{took:7.0f} ms   the loop waits {max(lags):6.1f} ms at its longest")
    watching.cancel()
    del tree


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=100_000)
    asyncio.run(measure(parser.parse_args().blocks))
