"""Serves the emulated API server on a free loopback port until stdin closes; prints its URL when it answers."""

from __future__ import annotations

import asyncio
import socket
import sys

import uvicorn

from .server import create_app


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(), log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)  # what connects now waits in the backlog
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
