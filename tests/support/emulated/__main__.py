"""Serves the emulated API server on a free loopback port until stdin closes; prints its URL when it answers."""

import socket
import sys
import threading

import uvicorn

from .server import create_app

if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    # Connections inherit it; without it an answer waits 40 ms for the client to acknowledge its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Connections are kept as long as the real server keeps them: one that is closed just when it is used is an error.
    server = uvicorn.Server(uvicorn.Config(create_app(), log_level="warning", timeout_keep_alive=180))
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)  # what connects now waits in the backlog
    sys.stdin.read()
