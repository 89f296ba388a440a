"""The journal: all processes know the same set of records, at any moment that one of them holds it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprise_engine.tiers import journal as journal_module
from reprise_engine.tiers.folder import PrivateFolder
from reprise_engine.tiers.journal import Change, Journal
from reprise_engine.tiers.record_files import RecordName
from reprise_engine.tiers.writers import Writer

ENTRIES_A_FILE = 8


def name(number: int) -> RecordName:
    return RecordName(number.to_bytes(48, "big"))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Journal]]:
    """Opens one more process's view of the same journal, which is replaced after 8 entries."""
    folder = PrivateFolder(tmp_path)
    with ExitStack() as stack:
        writer = Writer(folder)
        stack.callback(writer.close)

        def open_journal() -> Journal:
            opened_journal = Journal(folder, writer, rotate_bytes=64 * (1 + ENTRIES_A_FILE))
            stack.callback(opened_journal.close)
            return opened_journal

        yield open_journal


def news(journal: Journal) -> list[Change] | None:
    with journal.locked() as changes:
        return changes


def tell(journal: Journal, *changes: Change) -> list[Change] | None:
    with journal.locked() as others:
        journal.append(changes)
    return others


def test_changes_arrive_in_order_and_once(opened: Callable[[], Journal]) -> None:
    one, two = opened(), opened()
    assert not two.has_news()
    assert tell(one, Change(name(1), 100), Change(name(2), 200)) == []
    assert two.has_news()
    assert tell(two, Change(name(1), None)) == [Change(name(1), 100), Change(name(2), 200)]
    assert news(one) == [Change(name(1), None)]
    assert (news(one), news(two)) == ([], [])
    assert not one.has_news()
    assert news(opened()) == []  # whoever comes later looks at the folder


def test_a_new_file_goes_on_where_the_old_one_ended(opened: Callable[[], Journal], tmp_path: Path) -> None:
    one, two = opened(), opened()
    told = [Change(name(number), number) for number in range(ENTRIES_A_FILE + 3)]
    inode = os.stat(tmp_path / "reprise-kv-v1" / "journal").st_ino
    for change in told:
        tell(one, change)
    assert os.stat(tmp_path / "reprise-kv-v1" / "journal").st_ino != inode
    assert two.has_news()
    assert news(two) == told


def test_who_missed_a_whole_file_is_told_so(opened: Callable[[], Journal]) -> None:
    one, two = opened(), opened()
    for number in range(2 * ENTRIES_A_FILE + 3):
        tell(one, Change(name(number), 1))
    assert news(two) is None
    assert news(two) == []


def test_a_line_cut_short_is_written_over(opened: Callable[[], Journal], tmp_path: Path) -> None:
    one, two = opened(), opened()
    tell(one, Change(name(1), 1))
    with (tmp_path / "reprise-kv-v1" / "journal").open("ab") as file:
        file.write(b"half an entry")
    assert news(two) == [Change(name(1), 1)]
    assert not two.has_news()
    assert tell(two, Change(name(2), 2)) == []
    assert news(one) == [Change(name(2), 2)]


def test_only_one_holds_it(opened: Callable[[], Journal], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "LOCK_TIMEOUT_SECONDS", 0.05)
    one, two = opened(), opened()
    with one.locked(), pytest.raises(TimeoutError, match="another process has held its lock"):
        news(two)
    assert news(two) == []


def test_at_the_end_the_lock_is_waited_for_only_so_long(opened: Callable[[], Journal]) -> None:
    one, two = opened(), opened()
    begun = time.monotonic()
    hurry = threading.Timer(0.2, two.hurry, args=(0.2,))  # while it waits already
    hurry.start()
    with one.locked():
        with pytest.raises(TimeoutError, match="another process has held its lock"):
            news(two)
        assert 0.4 <= time.monotonic() - begun < 5.0
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            news(two)
        assert time.monotonic() - begun < 0.2
    hurry.join()
    assert news(two) == [], "a lock that is free is not asked for"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans()), max_size=60))
def test_everyone_ends_with_the_same_set(opened: Callable[[], Journal], steps: list[tuple[int, int, bool]]) -> None:
    journals = [opened() for _ in range(3)]
    truth: dict[RecordName, int] = {}
    known: list[dict[RecordName, int]] = [{} for _ in journals]

    def learn(which: int, changes: list[Change] | None) -> None:
        if changes is None:  # look at the folder
            known[which] = dict(truth)
        for change in changes or ():
            apply(known[which], change)

    for count, (which, number, added) in enumerate(steps):
        change = Change(name(number), count if added else None)
        with journals[which].locked() as others:
            learn(which, others)
            assert known[which] == truth
            journals[which].append([change])
        apply(truth, change)
        apply(known[which], change)
    for which, journal in enumerate(journals):
        learn(which, news(journal))
        assert known[which] == truth


def apply(records: dict[RecordName, int], change: Change) -> None:
    if change.size is None:
        records.pop(change.name, None)
    else:
        records[change.name] = change.size
