"""The store's folder as one process has it open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reprise_engine.tiers.folder import PrivateFolder, unusable
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
        raise unusable(given, error, need="Give a folder on a file system with locks (flock)") from error
