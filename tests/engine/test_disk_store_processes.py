"""Several processes on one folder, and processes that are killed: the bound holds, nothing wrong is served."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from reprise_engine.tiers import journal as journal_module
from reprise_engine.tiers import trouble
from reprise_engine.tiers.folder import FOLDER_NAME, PrivateFolder, create_file
from reprise_engine.tiers.writers import Writer
from tests.engine.disk_stores import (
    RECORD_BYTES,
    block,
    bytes_on_disk,
    get,
    has,
    open_store,
    put,
    record_files,
    temporary_files,
)

BOUND = 20
WORKER = """
import json, random, sys
from contextlib import closing
from pathlib import Path
from tests.engine.disk_stores import *
folder, seed, operations = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
identity = OTHER_IDENTITY if seed == 3 else IDENTITY
with closing(open_store(folder, records=int(sys.argv[4]), identity=identity)) as store:
    print("open", flush=True)
    for _ in range(operations):
        number = chance.randrange(60)
        if chance.random() < 0.5:
            assert put(store, number)
        else:
            assert get(store, number) in (None, block(number).payload)
        if chance.random() < 0.002:
            store.clear()
    stats = store.stats()
    print(json.dumps({name: getattr(stats, name) for name in ("hits", "writes", "evictions", "damaged", "failures")}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def start(folder: Path, *, seed: int, operations: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), str(seed), str(operations), str(BOUND)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def nobody_writes(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, so that its sum can be taken exactly."""
    path = folder / FOLDER_NAME / "journal"
    while True:
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue
            yield
            return


def test_the_bound_holds_while_several_write_evict_read_and_clear(folder: Path) -> None:
    workers = [start(folder, seed=seed, operations=800) for seed in range(4)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "open\n"
        most = 0
        looks = 0
        while any(worker.poll() is None for worker in workers):
            with nobody_writes(folder):
                total = bytes_on_disk(folder)
            assert total <= BOUND * RECORD_BYTES
            most = max(most, total)
            looks += 1
            time.sleep(0.005)
        results = []
        for worker in workers:
            out, err = worker.communicate()
            assert worker.returncode == 0, err
            results.append(json.loads(out))
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert looks > 10
    assert most == BOUND * RECORD_BYTES
    assert all(result["damaged"] == result["failures"] == 0 for result in results)
    assert all(result["hits"] > 0 and result["writes"] > 0 for result in results)
    assert sum(result["evictions"] for result in results) > 0
    assert temporary_files(folder) == []
    with closing(open_store(folder, records=BOUND)) as store:
        assert store.stats().bytes == bytes_on_disk(folder) <= BOUND * RECORD_BYTES


def test_kill_9_at_any_moment(folder: Path) -> None:
    chance = random.Random(7)
    served = 0
    with closing(open_store(folder, records=BOUND)) as witness:  # lives through all of it
        for seed in range(12):
            worker = start(folder, seed=seed % 3, operations=10**9)
            assert worker.stdout is not None
            assert worker.stdout.readline() == "open\n"
            time.sleep(chance.random() * 0.1)
            worker.send_signal(signal.SIGKILL)
            worker.communicate()
            with closing(open_store(folder, records=BOUND)) as store:
                assert temporary_files(folder) == []
                assert store.stats().bytes == bytes_on_disk(folder) <= BOUND * RECORD_BYTES
                for number in range(60):
                    found = get(store, number)
                    assert found in (None, block(number).payload)
                    assert (found is not None) == has(store, number)
                    served += found is not None
                assert store.stats().damaged == 0
            put(witness, 1000 + seed)
            assert bytes_on_disk(folder) <= BOUND * RECORD_BYTES
            # What was announced and never came counts, until it is asked for or evicted: never too little.
            assert witness.stats().bytes >= bytes_on_disk(folder)
        assert witness.stats().failures == 0
    assert served > 0
    assert len(record_files(folder)) <= BOUND


def test_what_a_living_process_is_writing_is_not_cleaned_up(folder: Path) -> None:
    living = Writer(PrivateFolder(folder))
    with living.directory() as within:
        os.close(create_file(living.temporary_name(), within=within))
    with closing(open_store(folder)):
        assert len(temporary_files(folder)) == 1
    os.close(living._fd)  # its end: the kernel drops the lock
    with closing(open_store(folder)):
        assert temporary_files(folder) == []
    assert list((folder / FOLDER_NAME / "writers").iterdir()) == []


def test_what_a_reset_cannot_delete_is_not_served_and_goes_with_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "LOCK_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(trouble, "RETRY_SECONDS", 0.0)
    with closing(open_store(tmp_path)) as store:
        assert put(store, 1)
        with (tmp_path / FOLDER_NAME / "journal").open("rb") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)  # a neighbour that is stopped
            assert store.clear() == 0
            assert store.stats().failures == 1
            assert block(1).key not in store
            assert get(store, 1) is None
        assert put(store, 2)
        assert block(1).key not in store
        assert get(store, 1) is None
        assert get(store, 2) == block(2).payload


def test_who_starts_leaves_the_empty_folder_of_a_record_on_its_way(folder: Path) -> None:
    """A writer makes the folders, then moves the file there: it holds the lock, and who starts does not."""
    with closing(open_store(folder, records=BOUND)) as store:
        put(store, 1)
        [record] = record_files(folder)
        record.unlink()
        with closing(open_store(folder, records=BOUND)):
            assert record.parent.is_dir()
        store.clear()
        assert not record.parent.exists(), "who clears holds the lock"
