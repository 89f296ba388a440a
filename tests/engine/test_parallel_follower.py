"""What a rank from 1 on says of its own end."""

from __future__ import annotations

import logging
from multiprocessing import Pipe
from typing import NoReturn

import pytest

from reprise_engine.config import EngineConfig, ModelConfig
from reprise_engine.errors import DeviceError, OutOfMemory, RepriseError
from reprise_engine.parallel import follower
from reprise_engine.parallel.shard import Place
from reprise_engine.parallel.talk import Failed, Join

JOIN = Join(
    config=EngineConfig(model=ModelConfig(model="m"), tensor_parallel_size=2),
    place=Place(rank=1, size=2),
    meeting_point="/nowhere",
    log_level=logging.INFO,
    slots=None,
)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("EL0005: [PID: 6] The resources are busy.", DeviceError),
        ("NPU out of memory. Tried to allocate 2.00 GiB", OutOfMemory),
        ("an operator failed", RuntimeError),
    ],
)
def test_what_a_device_or_its_memory_is_to_blame_for_comes_as_that(
    words: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that rank 0 ends with it, and the operator sees what it was."""

    def fail(*_arguments: object) -> NoReturn:
        raise RuntimeError(words)

    monkeypatch.setattr(follower, "build_runner", fail)
    ours, theirs = Pipe()
    with ours, theirs:
        assert follower.follow(JOIN, theirs) == 1
        failed = ours.recv()
    assert isinstance(failed, Failed)
    assert type(failed.error) is kind
    assert isinstance(failed.error, RepriseError) == (kind is not RuntimeError)
    assert not failed.lost_others
