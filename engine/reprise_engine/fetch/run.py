"""One fetch from start to end, in numbered steps.

1. complete already? Then nothing is asked of anybody: what serves restarts without its hub;
2. lock the folder, so that of several pods on one volume one fetches, and the others wait and find it complete;
3. list the files, choose those an engine reads;
4. bring what is missing, some at a time;
5. mark the folder as complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from reprise_engine.fetch.download import Downloader, patiently
from reprise_engine.fetch.files import RemoteFile, wanted
from reprise_engine.fetch.progress import Progress, amount, duration
from reprise_engine.fetch.sources import HuggingFace, ModelScope, Source
from reprise_engine.fetch.store import Complete, ModelFolder
from reprise_engine.fetch.uri import BucketModel, ModelUri
from reprise_engine.fetch.web import SILENCE_SECONDS, Retries, open_session

logger = logging.getLogger(__name__)

LOCK_POLL_SECONDS = 1.0
LOCK_WORDS_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """`parallel` files at a time; a line of progress each `progress_seconds`."""

    uri: ModelUri
    folder: Path
    parallel: int = 4
    progress_seconds: float = 5.0
    retries: Retries = field(default_factory=Retries)
    silence_seconds: float = SILENCE_SECONDS


async def fetch(options: FetchOptions, environment: Mapping[str, str]) -> Complete:
    """Brings the model into `options.folder`, or finds it there.

    Raises FetchError, ModelNotFound, DamagedModel, UnsupportedModel, ConfigError.
    """
    folder, uri = ModelFolder(options.folder), str(options.uri)
    present = folder.complete(uri)
    if present is not None:
        logger.info("%s is complete in %s: %s", uri, options.folder, amount(sum(present.sizes.values())))
        return present
    async with _locked(folder):
        present = folder.complete(uri)
        if present is not None:
            logger.info("%s was fetched into %s by another process", uri, options.folder)
            return present
        async with open_session(connections=options.parallel + 1, silence=options.silence_seconds) as session:
            await _fetch(options, folder, session, environment)
    complete = folder.complete(uri)
    assert complete is not None
    return complete


async def _fetch(
    options: FetchOptions, folder: ModelFolder, session: aiohttp.ClientSession, environment: Mapping[str, str]
) -> None:
    began, uri = time.monotonic(), str(options.uri)
    source = _source(options.uri, session, environment)
    everything = await patiently(source.list, options.retries)
    listing = replace(everything, files=wanted(everything.files, source=uri))
    missing = await asyncio.to_thread(folder.begin, listing)
    at = "" if listing.revision is None else f" at {listing.revision}"
    logger.info(
        "%s%s: %d files, %s, into %s; %d of them are to come",
        *(uri, at, len(listing.files), amount(listing.size), options.folder, len(missing)),
    )
    progress = Progress(total=listing.size, kept=listing.size - sum(file.size for file in missing))
    downloader = Downloader(
        source=source, listing=listing, folder=folder, session=session, progress=progress, retries=options.retries
    )
    async with _reported(progress, options.progress_seconds):
        await _bring_all(downloader, missing, parallel=options.parallel)
    await asyncio.to_thread(folder.finish, uri, listing)
    logger.info("%s: complete after %s", uri, duration(time.monotonic() - began))


def _source(uri: ModelUri, session: aiohttp.ClientSession, environment: Mapping[str, str]) -> Source:
    if isinstance(uri, BucketModel):
        # Its SDK takes a quarter of a second to import, and the hubs do without.
        from reprise_engine.fetch.bucket import Bucket

        return Bucket(uri, environment)
    return (HuggingFace if uri.hub == "hf" else ModelScope)(uri, session, environment)


async def _bring_all(downloader: Downloader, files: tuple[RemoteFile, ...], *, parallel: int) -> None:
    """The first file that cannot be brought ends the others: what they have so far is kept."""
    # The small ones first: a wrong tokenizer.json shows before the weights have come.
    pending = iter(sorted(files, key=lambda file: file.size))

    async def work() -> None:
        for file in pending:
            await downloader.bring(file)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(parallel, len(files))):
                group.create_task(work())
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None


@contextlib.asynccontextmanager
async def _locked(folder: ModelFolder) -> AsyncIterator[None]:
    told: float | None = None
    while True:
        with folder.try_lock() as ours:
            if ours:
                yield
                return
        if told is None or time.monotonic() - told >= LOCK_WORDS_SECONDS:
            logger.info("another process fetches into %s; waiting for it", folder.folder)
            told = time.monotonic()
        await asyncio.sleep(LOCK_POLL_SECONDS)


@contextlib.asynccontextmanager
async def _reported(progress: Progress, seconds: float) -> AsyncIterator[None]:
    async def report() -> None:
        while True:
            await asyncio.sleep(seconds)
            logger.info("%s", progress.line())

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting
