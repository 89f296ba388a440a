"""The disk store: what it keeps and what it refuses. Whom it lets in: test_disk_store_access.py."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from reprise_engine.tiers import trouble
from reprise_engine.tiers.books import Books
from reprise_engine.tiers.disk import DiskStore
from reprise_engine.tiers.folder import FOLDER_NAME
from reprise_engine.tiers.identity import CacheIdentity, canonical_config
from reprise_engine.tiers.record_files import RecordName
from tests.engine.disk_stores import (
    IDENTITY,
    OTHER_IDENTITY,
    PAYLOAD_BYTES,
    RECORD_BYTES,
    block,
    bytes_on_disk,
    get,
    has,
    open_store,
    put,
    record_file,
    record_files,
    temporary_files,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(folder: Path) -> Iterator[DiskStore]:
    with closing(open_store(folder)) as opened:
        yield opened


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wants to wait 10 s."""
    monkeypatch.setattr(trouble, "RETRY_SECONDS", 0.05)


def eventually(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.02)


def age(path: Path, seconds: float) -> None:
    """Makes the file that much older."""
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_a_record_survives_a_restart(folder: Path) -> None:
    with closing(open_store(folder)) as store:
        assert not has(store, 1)
        assert get(store, 1) is None
        assert put(store, 1)
        assert has(store, 1)
        assert get(store, 1) == block(1).payload
    with closing(open_store(folder)) as store:
        assert has(store, 1)
        assert not has(store, 2)
        assert get(store, 1) == block(1).payload
        assert get(store, 2) is None
        stats = store.stats()
        assert (stats.records, stats.bytes, stats.capacity) == (1, RECORD_BYTES, 100 * RECORD_BYTES)
        assert (stats.hits, stats.misses, stats.writes, stats.damaged, stats.failures) == (1, 1, 0, 0, 0)


def test_it_is_written_once(folder: Path, store: DiskStore) -> None:
    assert put(store, 1)
    before = record_file(folder, 1).stat()
    assert put(store, 1)
    assert record_file(folder, 1).stat().st_ino == before.st_ino
    assert store.stats().writes == 1


def test_parent_and_tokens_are_verified_not_only_the_key(folder: Path, store: DiskStore) -> None:
    it, other = block(1), block(2)
    into = memoryview(bytearray(PAYLOAD_BYTES))
    for parent, tokens in ((other.parent, it.tokens), (None, it.tokens), (it.parent, other.tokens), (it.parent, b"")):
        assert put(store, 1)
        assert not store.read(it.key, parent=parent, tokens=tokens, into=into)
        assert it.key not in store
        assert record_files(folder) == []
    assert put(store, 1)
    assert store.read(it.key, parent=it.parent, tokens=it.tokens, into=into)


def test_another_identity_sees_nothing_and_clears_nothing_but_its_own(folder: Path, store: DiskStore) -> None:
    put(store, 1)
    with closing(open_store(folder, identity=OTHER_IDENTITY)) as other:
        assert not has(other, 1)
        assert get(other, 1) is None
        put(other, 1)
        put(other, 2)
        assert other.stats().records == 3
        assert other.clear() == 2
        assert get(other, 1) is None
    assert get(store, 1) == block(1).payload


def test_a_record_of_another_identity_under_our_name_is_not_served(folder: Path, store: DiskStore) -> None:
    put(store, 1)
    with closing(open_store(folder, identity=OTHER_IDENTITY)) as other:
        put(other, 1)
        put(other, 2)
        os.replace(record_file(folder, 1), record_file(folder, 1, identity=OTHER_IDENTITY))
        os.replace(record_file(folder, 2, identity=OTHER_IDENTITY), record_file(folder, 1))
        assert get(other, 1) is None
        assert get(store, 1) is None
        assert (other.stats().damaged, store.stats().damaged) == (0, 0)  # whole, but not what was asked for


@pytest.mark.parametrize("field", [field.name for field in fields(CacheIdentity)])
def test_every_field_is_part_of_the_identity(field: str) -> None:
    value = getattr(IDENTITY, field)
    different: dict[str, Any] = {field: value + 1 if isinstance(value, int) else value + "!"}
    changed = replace(IDENTITY, **different)
    assert changed.digest() != IDENTITY.digest()
    assert len(IDENTITY.digest()) == 16


def test_the_configuration_counts_with_its_rope_but_not_where_it_lies() -> None:
    here = {"_name_or_path": "/a", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "n": {2, 1}}
    there = {"n": {1, 2}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "_name_or_path": "/b"}
    scaled = {**here, "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}
    assert canonical_config(here) == canonical_config(there)
    assert canonical_config(here) != canonical_config(scaled)


# The bound


def test_the_least_recently_used_record_goes(folder: Path) -> None:
    with closing(open_store(folder, records=3)) as store:
        for number in (1, 2, 3):
            put(store, number)
        get(store, 1)
        put(store, 4)
        assert [has(store, number) for number in (1, 2, 3, 4)] == [True, False, True, True]
        assert bytes_on_disk(folder) == store.stats().bytes == 3 * RECORD_BYTES
        assert store.stats().evictions == 1


def test_the_order_of_use_survives_a_restart(folder: Path) -> None:
    with closing(open_store(folder, records=3)) as store:
        for number in (1, 2, 3):
            put(store, number)
            age(record_file(folder, number), 1000 - number)
    with closing(open_store(folder, records=3)) as store:
        assert get(store, 1) is not None  # the time of the file is renewed
    with closing(open_store(folder, records=3)) as store:
        put(store, 4)
        assert [has(store, number) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_a_chain_loses_its_end_first_also_after_a_restart(folder: Path) -> None:
    root_to_end = (1, 2, 3)
    with closing(open_store(folder, records=4)) as store:
        for number in (*root_to_end, 4):
            put(store, number)
            age(record_file(folder, number), 1000)
    for _ in range(2):
        with closing(open_store(folder, records=4)) as store:
            get(store, 4)
            for number in root_to_end:
                get(store, number)
            store.touch(block(number).key for number in reversed(root_to_end))
    with closing(open_store(folder, records=4)) as store:
        put(store, 5)
        put(store, 6)
        assert [has(store, number) for number in (*root_to_end, 4)] == [True, True, False, False]


def test_what_another_process_uses_is_not_evicted_first(folder: Path) -> None:
    with closing(open_store(folder, records=2)) as store:
        for number in (1, 2):
            put(store, number)
            age(record_file(folder, number), 1000)
    with closing(open_store(folder, records=2)) as store, closing(open_store(folder, records=2)) as other:
        assert get(other, 1) is not None
        eventually(lambda: record_file(folder, 1).stat().st_mtime > record_file(folder, 2).stat().st_mtime + 60)
        put(store, 3)
        assert [path.name for path in record_files(folder)] == sorted(block(n).key.hex() for n in (1, 3))


def test_a_smaller_bound_is_met_at_once(folder: Path) -> None:
    with closing(open_store(folder)) as store:
        for number in range(10):
            put(store, number)
    with closing(open_store(folder, records=4)) as store:
        assert store.stats().records == 4
        assert len(record_files(folder)) == 4


def test_the_bound_is_over_all_identities(folder: Path) -> None:
    with closing(open_store(folder, records=2)) as store:
        put(store, 1)
        put(store, 2)
    with closing(open_store(folder, records=2, identity=OTHER_IDENTITY)) as other:
        put(other, 3)
        assert len(record_files(folder)) == 2
        put(other, 4)
    assert record_files(folder) == sorted(record_file(folder, n, identity=OTHER_IDENTITY) for n in (3, 4))


def test_clear_gives_the_space_back(folder: Path, store: DiskStore) -> None:
    for number in range(5):
        put(store, number)
    assert store.clear() == 5
    assert (store.stats().records, store.stats().bytes, record_files(folder)) == (0, 0, [])
    assert put(store, 1)
    assert get(store, 1) == block(1).payload


def test_what_was_learnt_of_an_old_record_is_not_done_to_a_new_one() -> None:
    books, name = Books(), RecordName(bytes(48))
    books.add(name, 1, used=0.0)
    old = books.get(name)
    assert old is not None
    books.add(name, 5000, used=1.0)  # evicted and written again by another process, while this one found nothing
    books.remove_if_same(name, old)
    assert (name in books, books.bytes, len(books)) == (True, 8192, 1)
    new = books.get(name)
    assert new is not None
    books.remove_if_same(name, new)
    assert (name in books, books.bytes, len(books)) == (False, 0, 0)


# Other processes (here: other stores on the same folder; test_disk_store_processes.py has real ones)


def test_records_of_another_are_found_and_their_end_too(folder: Path, store: DiskStore) -> None:
    with closing(open_store(folder)) as other:
        put(other, 1)
        assert get(store, 1) == block(1).payload  # read has the last word, even before the news arrives
        eventually(lambda: has(store, 1))
        other.clear()
        eventually(lambda: not has(store, 1))
        assert store.stats().bytes == 0


def test_what_another_evicted_is_forgotten_when_it_is_asked_for(folder: Path, store: DiskStore) -> None:
    put(store, 1)
    record_file(folder, 1).unlink()
    assert has(store, 1)
    assert get(store, 1) is None
    assert not has(store, 1)
    assert put(store, 1)
    assert get(store, 1) == block(1).payload


def test_a_folder_removed_under_its_feet_is_made_anew(folder: Path, store: DiskStore, unhurried: None) -> None:
    put(store, 1)
    shutil.rmtree(folder / FOLDER_NAME)
    assert not put(store, 2)
    eventually(lambda: put(store, 3))
    assert [get(store, n) for n in (1, 2, 3)] == [None, None, block(3).payload]
    assert stat.S_IMODE((folder / FOLDER_NAME).stat().st_mode) == 0o700
    with closing(open_store(folder)) as other:
        assert get(other, 3) == block(3).payload
        put(other, 4)
        eventually(lambda: has(store, 4))


def test_two_stores_that_meet_a_removed_folder_share_the_new_one(folder: Path, unhurried: None) -> None:
    with closing(open_store(folder, records=4)) as one, closing(open_store(folder, records=4)) as two:
        put(one, 1)
        for path in (folder / FOLDER_NAME).iterdir():  # rm -rf of its contents
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        eventually(lambda: put(one, 2))
        eventually(lambda: put(two, 3))
        for number in range(10, 20):
            assert put(one, number)
            assert put(two, 10 + number)
        assert len(record_files(folder)) == 4
        assert one.stats().bytes <= 4 * RECORD_BYTES


# Threads


def test_many_threads_read_write_and_clear(folder: Path) -> None:
    with closing(open_store(folder, records=20)) as store:

        def work(seed: int) -> int:
            served = 0
            for step in range(150):
                number = (seed * 7 + step * 13) % 40
                if step % 3 == 0:
                    assert put(store, number)
                found = get(store, number)
                assert found in (None, block(number).payload)
                served += found is not None
                if step == 75 and seed == 0:
                    store.clear()
            return served

        with ThreadPoolExecutor(8) as pool:
            served = sum(pool.map(work, range(8)))
        stats = store.stats()
        assert served == stats.hits > 0
        assert stats.hits + stats.misses == 8 * 150
        assert (stats.damaged, stats.failures) == (0, 0)
        assert stats.bytes == bytes_on_disk(folder) <= 20 * RECORD_BYTES
        assert temporary_files(folder) == []


def test_after_close_nothing_is_found_or_written(folder: Path) -> None:
    store = open_store(folder)
    put(store, 1)
    store.close()
    store.close()
    assert (has(store, 1), get(store, 1), put(store, 2), store.clear()) == (False, None, False, 0)
    assert list((folder / FOLDER_NAME / "writers").iterdir()) == []
