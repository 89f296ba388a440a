"""One file: taken up where it ended, verified, put in place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import aiohttp

from reprise_engine.errors import DamagedModel, ModelFetchFailed
from reprise_engine.fetch.files import Listing, RemoteFile
from reprise_engine.fetch.progress import Progress
from reprise_engine.fetch.sources import Source
from reprise_engine.fetch.store import ModelFolder, Part, volume_errors
from reprise_engine.fetch.web import Retries, Transient, get

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
MOST_DAMAGED = 2
"""A file whose digest is wrong is fetched once more, from its first byte: it may have been damaged on the way."""

T = TypeVar("T")


async def patiently(call: Callable[[], Awaitable[T]], retries: Retries) -> T:
    """The answer of `call`, tried again while it raises Transient. Raises ModelFetchFailed after the last attempt."""
    failures = 0
    while True:
        try:
            return await call()
        except Transient as error:
            failures += 1
            await _pause(failures, error, retries)


async def _pause(failures: int, error: Transient, retries: Retries) -> None:
    if failures >= retries.attempts:
        raise ModelFetchFailed(
            f"{error}; given up after {failures} attempts. Check that the pod may reach it: network policy, proxy "
            "(HTTPS_PROXY in spec.runtime.env), the address of a mirror. What has come so far is kept on the volume."
        ) from error
    pause = retries.pause(failures, after=error.after)
    logger.warning("%s; try %d of %d follows in %.1f s", error, failures + 1, retries.attempts, pause)
    await asyncio.sleep(pause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloader:
    """Brings files of one listing."""

    source: Source
    listing: Listing
    folder: ModelFolder
    session: aiohttp.ClientSession
    progress: Progress
    retries: Retries

    async def bring(self, file: RemoteFile) -> None:
        """Returns when the file is in place. Raises FetchError, ModelNotFound, DamagedModel."""
        part = self.folder.part(file)
        try:
            with volume_errors(self.folder.folder):
                await asyncio.to_thread(part.open)
            self.progress.add(part.size)
            if part.size:
                logger.info("%s: goes on after %d of %d bytes", file.path, part.size, file.size)
            for attempt in range(MOST_DAMAGED):
                await self._complete(part)
                if part.is_sound():
                    await asyncio.to_thread(self.folder.place, part)
                    return
                if attempt + 1 < MOST_DAMAGED:
                    logger.warning("%s: is not what the listing says; it is fetched once more", file.path)
                self._restart(part)
        finally:
            part.close()
        raise DamagedModel(
            f"{file.path}: what came is not what the listing says, twice in a row ({file.size} bytes, "
            f"{file.digest.algorithm if file.digest else 'size'} {file.identity}). A proxy or mirror on the way may "
            "change it, or the file was replaced meanwhile."
        )

    async def _complete(self, part: Part) -> None:
        """All bytes of the part, whatever they are."""
        failures = 0
        while part.size < part.file.size:
            before = part.size
            try:
                await self._attempt(part)
            except Transient as error:
                failures = 1 if part.size > before else failures + 1
                await _pause(failures, error, self.retries)

    async def _attempt(self, part: Part) -> None:
        file, what = part.file, part.file.path
        request = await self.source.request(file, self.listing)
        # The bytes themselves, since sizes and ranges count those.
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={part.size}-"}
        async with get(self.session, request, what=what, headers=headers) as response:
            if response.status == 412:
                raise ModelFetchFailed(
                    f"{what}: was replaced while it was fetched; the next start lists the model anew."
                )
            if response.status == 416 or (response.status == 206 and not _continues(response, part)):
                self._restart(part)
                raise Transient(f"{what}: the server has other bytes than were listed")
            if response.status == 200 and part.size:
                self._restart(part)  # it does not do ranges
            async for data in response.content.iter_chunked(CHUNK_BYTES):
                if part.size + len(data) > file.size:
                    self._restart(part)
                    raise Transient(f"{what}: more came than the {file.size} bytes that were listed")
                with volume_errors(self.folder.folder):
                    await asyncio.to_thread(part.write, data)
                self.progress.add(len(data))
        if part.size < file.size:
            raise Transient(f"{what}: the answer ended after {part.size} of {file.size} bytes")

    def _restart(self, part: Part) -> None:
        self.progress.add(-part.size)
        with volume_errors(self.folder.folder):
            part.reset()


def _continues(response: aiohttp.ClientResponse, part: Part) -> bool:
    """Whether the bytes of a 206 are those that were asked for."""
    content_range = response.headers.get("Content-Range", "")
    unit, _, rest = content_range.partition(" ")
    span, _, total = rest.partition("/")
    begin = span.partition("-")[0]
    return unit == "bytes" and begin == str(part.size) and total in (str(part.file.size), "*")
