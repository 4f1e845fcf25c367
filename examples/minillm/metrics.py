"""Reading a server's gauges."""

from __future__ import annotations

import aiohttp


async def read_metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The gauges of the engine at `url`; those with labels have them in their names."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
