"""Serves the emulated API server on a free loopback port until stdin closes; prints its URL when it answers."""

from __future__ import annotations

import asyncio
import sys

import uvicorn

from .server import create_app


async def main() -> None:
    config = uvicorn.Config(create_app(), host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
