"""Many requests at once, with asyncio; the server computes them together: python examples/many_at_once.py [URL]"""

import asyncio
import sys

from mstar.client import AsyncClient, ClientError, StatusError

CITIES = ("Paris", "Rome", "Berlin", "Madrid", "Vienna", "Lisbon")


async def ask(client: AsyncClient, city: str) -> str:
    try:
        answer = await client.chat(f"Which country is {city} in?", temperature=0, max_tokens=24)
    except StatusError as error:
        return f"{city}: refused with {error.status}, {error.message}"
    return f"{city}: {answer.text}"


async def main(url: str = "http://127.0.0.1:8000") -> None:
    async with AsyncClient(url, max_retries=3) as client:
        for line in await asyncio.gather(*(ask(client, city) for city in CITIES)):
            print(line)


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except ClientError as error:
        sys.exit(str(error))
