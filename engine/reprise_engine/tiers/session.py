"""The store's folder as one process has it open."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from reprise_engine.errors import ConfigError
from reprise_engine.tiers.folder import PrivateFolder
from reprise_engine.tiers.journal import Journal
from reprise_engine.tiers.record_files import RecordName, scan_records
from reprise_engine.tiers.writers import Writer


@dataclass(frozen=True, slots=True)
class Session:
    """Replaced as a whole where the folder was removed under our feet."""

    folder: PrivateFolder
    writer: Writer
    journal: Journal

    def close(self) -> None:
        """The folder's descriptor stays open as long as a thread uses it."""
        self.writer.close()
        self.journal.close()


def open_session(given: Path) -> tuple[Session, list[tuple[float, RecordName, int]]]:
    """And (time of last use, name, size) of the records in it. Raises ConfigError, naming --prefix-cache-dir."""
    folder = PrivateFolder(given)
    try:
        writer = Writer(folder)
        try:
            journal = Journal(folder, writer)
        except OSError:
            writer.close()
            raise
        session = Session(folder, writer, journal)
        try:
            return session, scan_records(folder)
        except OSError:
            session.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--prefix-cache-dir is {given}, which cannot be used: {error.strerror}. Give a folder on a file system "
            f"with locks (flock) that user {os.geteuid()} may write to, or leave the flag out."
        ) from error
