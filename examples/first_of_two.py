"""Two answers race; the slower one is cancelled, and what it held is freed: python examples/first_of_two.py TARGET"""

import asyncio
import sys

from pillion import AsyncClient


async def answer(client: AsyncClient, question: str, seed: int) -> str:
    message = {"role": "user", "content": question}
    deltas = client.chat([message], temperature=0.8, seed=seed, max_tokens=32, timeout_s=60)
    return "".join([delta.text async for delta in deltas])


async def main(target: str) -> None:
    async with AsyncClient(target) as client:
        racers = [asyncio.create_task(answer(client, "Tell me about the sea.", seed)) for seed in (1, 2)]
        done, slower = await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
        for task in slower:
            task.cancel()
        print(repr(done.pop().result()))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
