"""The server's log: one line a fact, on stderr. The lines of requests are written by `access.py`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from reprise_engine.config import EngineConfig, ResolvedConfig

TERMINATION_LOG = "/dev/termination-log"
_TERMINATION_LINE_LIMIT = 2000
"""Characters; the kubelet keeps 4,096 bytes."""


def configure(level: str) -> None:
    """Of this process. uvicorn's loggers propagate to the root's one handler."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


def describe_start(config: EngineConfig, resolved: ResolvedConfig, *, url: str, names: tuple[str, ...]) -> list[str]:
    """The lines that tell a person what is being served, and where."""
    tokens = resolved.num_gpu_blocks * resolved.block_size
    caching = "on" if resolved.enable_prefix_caching else "off"
    chunked = "on" if resolved.enable_chunked_prefill else "off"
    size = config.tensor_parallel_size
    ranks = f" × {size} ranks" if size > 1 else ""
    lines = [
        f"Reprise {resolved.version} serves {', '.join(names)} at {url}/v1",
        f"  model      {config.model.model}, {resolved.dtype} on {resolved.device}{ranks}, "
        f"context {resolved.max_model_len} tokens",
        f"  KV cache   {resolved.num_gpu_blocks} blocks of {resolved.block_size} = {tokens} tokens, "
        f"prefix caching {caching}, up to {resolved.prefix_cache_pin_blocks} blocks pinned",
        f"  scheduler  up to {resolved.max_num_seqs} sequences, {resolved.max_num_batched_tokens} tokens a step, "
        f"chunked prefill {chunked}",
    ]
    cache, tiers = config.cache, []
    if cache.prefix_cache_host_memory:
        tiers.append(f"{cache.prefix_cache_host_memory / 2**30:.2f} GiB of host memory")
    if cache.prefix_cache_dir is not None:
        tiers.append(f"{cache.disk_size / 2**30:.2f} GiB in {cache.prefix_cache_dir}")
    if tiers:
        lines.insert(3, f"  tiers      {', '.join(tiers)}")
    return lines


def last_words(message: str) -> None:
    """One line for the kubelet, which shows it as the container's termination message. Never fails.

    The file, $TERMINATION_LOG_PATH or the kubelet's default, is written only where it exists: the kubelet makes it.
    """
    path = Path(os.environ.get("TERMINATION_LOG_PATH") or TERMINATION_LOG)
    line = " ".join(message.split())[:_TERMINATION_LINE_LIMIT]
    try:
        if path.is_file() and os.access(path, os.W_OK):
            path.write_text(line + "\n", encoding="utf-8")
    except OSError:
        logging.getLogger(__name__).warning("cannot write %s", path)
