"""Compiles the CPU kernels: `python -m reprise_engine.native.build`, or this file run by any Python.

Every source is compiled once a level with the level's instruction set, and all go into one shared library beside this
file. Its name carries a digest of the sources and flags, so a library of other sources is never loaded, and building
twice does nothing. Only the standard library is used: an image's builder stage has nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "src"

_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    # Neither errno nor floating-point traps are read; sums are never reordered (no -ffast-math).
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    # gcc 12 takes its own intrinsics' undefined inputs for mistakes; vector arguments never cross the library's border.
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi"),
)
_X86_LEVELS = {
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma"),
        "-mprefer-vector-width=512",
    ),
    "avx2": ("-mavx2", "-mfma"),
}
_COMPILERS = ("g++", "c++")


class BuildError(Exception):
    """The kernels cannot be built here; the message says why."""


def levels() -> Mapping[str, tuple[str, ...]]:
    """The levels of this kind of processor, best first, with the compiler flags of each."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {**(_X86_LEVELS if x86 else {}), "portable": ()}


def library_path() -> Path:
    """Where the library of these very sources is, or will be."""
    digest = hashlib.sha256(repr((_FLAGS, dict(levels()), platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return FOLDER / f"kernels-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Compiles what is not compiled yet and removes libraries of older sources. Raises BuildError."""
    target = library_path()
    if target.exists():
        return target
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler: none of {', '.join(_COMPILERS)} is on PATH")
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".build-") as folder:
        objects: list[Path] = []
        for source in sorted(SOURCES.glob("*.cpp")):
            for level, flags in levels().items() if source.stem != "level" else [("any", ())]:
                objects.append(Path(folder) / f"{source.stem}-{level}.o")
                options = (*_FLAGS, *flags, f"-DLEVEL={level}")
                _run([compiler, *options, "-c", str(source), "-o", str(objects[-1])])
        library = Path(folder) / target.name
        # Not linked to libgomp: its functions are those of the copy that torch has loaded, so both share its threads.
        _run([compiler, "-shared", "-s", *map(str, objects), "-o", str(library)])
        library.replace(target)
    for old in FOLDER.glob("kernels-*.so"):
        if old != target:
            old.unlink()
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed with code {done.returncode}:\n{done.stderr[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the engine's CPU kernels.")
    parser.add_argument("--optional", action="store_true", help="succeed without a library where it cannot be built")
    parser.add_argument("--quiet", action="store_true", help="say nothing of success")
    arguments = parser.parse_args()
    try:
        path = build()
    except BuildError as error:
        sys.stderr.write(f"The CPU kernels are not built, the engine will use plain torch: {error}\n")
        sys.exit(0 if arguments.optional else 1)
    if not arguments.quiet:
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
