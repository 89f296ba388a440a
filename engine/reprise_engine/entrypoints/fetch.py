"""`reprise fetch`: brings a model onto a volume. Its flags, its exit codes, its last words."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from reprise_engine.errors import (
    ConfigError,
    DamagedModel,
    ModelFetchDenied,
    ModelFetchFailed,
    ModelNotFound,
    ModelVolumeFull,
    ModelVolumeUnusable,
    RepriseError,
)
from reprise_engine.fetch.uri import parse_uri
from reprise_engine.server import logs

if TYPE_CHECKING:
    from reprise_engine.fetch.run import FetchOptions

logger = logging.getLogger(__name__)

EXIT_CODES: dict[type[RepriseError], int] = {
    ConfigError: 2,
    ModelNotFound: 3,
    ModelFetchDenied: 4,
    ModelVolumeFull: 5,
    ModelVolumeUnusable: 6,
    DamagedModel: 7,
    ModelFetchFailed: 8,
}
"""Any other error is 1; a signal, 128 and its number."""


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "uri", metavar="URI", help="hf://org/name[@revision], modelscope://org/name or s3://bucket/path"
    )
    parser.add_argument(
        "--to", required=True, type=Path, metavar="DIR", help="folder of the model, made if it is not there"
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit, of a hub's model")
    parser.add_argument("--parallel", type=int, default=4, metavar="N", help="files at a time (default: %(default)s)")
    parser.add_argument(
        "--progress-seconds", type=float, default=5.0, metavar="S", help="a line each S seconds (default: %(default)s)"
    )


def main(parsed: argparse.Namespace) -> int:
    """Returns the exit code. Credentials come from the environment only: an argument shows in listings of processes."""
    logs.configure("info")
    try:
        return asyncio.run(_run(_options(parsed)))
    except RepriseError as error:
        # The operator reads the class of the error from the last words: it becomes the reason in the status.
        logs.last_words(f"{type(error).__name__}: {error}")
        logger.error("%s", error)
        return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def _options(parsed: argparse.Namespace) -> FetchOptions:
    # Here, since every server parses these flags with its own: it needs no aiohttp.
    from reprise_engine.fetch.run import FetchOptions

    if not 1 <= parsed.parallel <= 32:
        raise ConfigError(f"--parallel is {parsed.parallel}; it must be 1 to 32.")
    if not 0.1 <= parsed.progress_seconds <= 3600:
        raise ConfigError(f"--progress-seconds is {parsed.progress_seconds:g}; it must be 0.1 to 3600.")
    return FetchOptions(
        uri=parse_uri(parsed.uri, revision=parsed.revision),
        folder=parsed.to,
        parallel=parsed.parallel,
        progress_seconds=parsed.progress_seconds,
    )


async def _run(options: FetchOptions) -> int:
    """Without a handler the first process of a container would not even notice SIGTERM."""
    from reprise_engine.fetch.run import fetch

    work = asyncio.current_task()
    assert work is not None
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        work.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await fetch(options, os.environ)
    except asyncio.CancelledError:
        if not received:
            raise
        logger.info("stopped by %s; what has come so far is kept", received[0].name)
        return 128 + received[0]
    return 0
