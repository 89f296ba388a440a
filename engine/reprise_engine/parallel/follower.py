"""A rank from 1 on: loads its part of the model, then computes its part of each step it is told."""

from __future__ import annotations

import logging
import pickle
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from reprise_engine.allocator import return_freed_memory
from reprise_engine.attention import create_attention_backend
from reprise_engine.core import choose_block_size, make_kv_cache, make_promises
from reprise_engine.device import limit_cpu_threads, resolve_device
from reprise_engine.errors import RepriseError
from reprise_engine.memory_facts import block_shape, gather_facts
from reprise_engine.models.loader import load_model
from reprise_engine.native import load_kernels
from reprise_engine.npu_troubles import as_device_error
from reprise_engine.out_of_memory import Phase, as_out_of_memory, naming_phase
from reprise_engine.parallel.group import Group, LostRank, open_group
from reprise_engine.parallel.layers import connect_ranks
from reprise_engine.parallel.runner import meet_after_transfers
from reprise_engine.parallel.slots import SharedSlots
from reprise_engine.parallel.talk import Allocate, Allocated, Failed, Join, Loaded, Meet, Sized
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.runner.profiling import NPUMemory
from reprise_engine.runner.transfer import create_transfer
from reprise_engine.step import Step

logger = logging.getLogger(__name__)


def follow(join: Join, connection: Connection) -> int:
    """Until rank 0 hangs up. Returns the exit code."""
    _configure_logging(join)
    phase = Phase.START
    try:
        runner, group = build_runner(join, connection)
        phase = Phase.RUNNING
        while True:
            step: Step = connection.recv()
            runner.run(step)
            meet_after_transfers(step, group)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # rank 0 is gone, or wants no more
    except (Exception, MemoryError) as error:
        logger.debug("rank %d cannot go on", join.place.rank, exc_info=True)
        told = as_out_of_memory(error, phase) or as_device_error(error) or error
        with suppress(OSError):
            connection.send(Failed(error=_sendable(told), lost_others=isinstance(error, LostRank)))
        return 1


def build_runner(join: Join, connection: Connection) -> tuple[ModelRunner, Group]:
    """This rank's part of what `core.build_core` builds, step by step with rank 0. Raises what that raises."""
    config, place = join.config, join.place
    device = resolve_device(config.device, rank=place.rank, size=place.size)
    device_type: Literal["cpu", "npu"] = "npu" if device.type == "npu" else "cpu"
    block_size = choose_block_size(config.cache, device_type)
    npu_memory = NPUMemory.probe(device) if device_type == "npu" else None
    kernels = None
    if device_type == "cpu":
        limit_cpu_threads(sharing=place.size)
        return_freed_memory()
        kernels = load_kernels()
    promises = make_promises(device_type)  # before rank 0 keeps all others from making one
    with naming_phase(Phase.WEIGHTS):
        model = load_model(config.model, device=device, kernels=kernels, place=place)
    connection.send(Loaded())

    meet: Meet = connection.recv()
    assert isinstance(meet, Meet), f"expected Meet, got {meet!r}"
    group = open_group(place, Path(join.meeting_point), device)
    connect_ranks(model.module, group)
    shape = block_shape(model, block_size)
    with naming_phase(Phase.PROFILING):
        facts = gather_facts(
            model,
            config,
            npu_memory,
            native=kernels is not None,
            promised=0,
            shape=shape,
            max_model_len=model.spec.choose_max_model_len(config.model.max_model_len),
            place=place,
        )
    connection.send(Sized(facts))

    allocate: Allocate = connection.recv()
    with naming_phase(Phase.KV_CACHE):
        kv = make_kv_cache(model, num_blocks=allocate.num_blocks, block_size=block_size)
        transfer = None
        if join.slots is not None:
            slots = SharedSlots(
                join.slots, num_slots=allocate.num_slots, size=place.size, part_bytes=shape.bytes_per_block
            )
            transfer = create_transfer(kv, num_slots=allocate.num_slots, slots_QX=slots.part(place.rank))
    if promises is not None:
        # While rank 0 keeps all others from planning.
        promises.promise(facts.activations + facts.host_tier + allocate.num_blocks * shape.bytes_per_block)
    connection.send(Allocated())
    backend = create_attention_backend(device, kernels)
    return ModelRunner(model, backend, kv, seed=config.model.seed, transfer=transfer), group


def _sendable(error: BaseException) -> Exception:
    """One of ours as it is, where it survives the way; of others the words."""
    if isinstance(error, RepriseError):
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _configure_logging(join: Join) -> None:
    logging.basicConfig(
        level=join.log_level,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s rank {join.place.rank}: %(message)s",
        datefmt="%H:%M:%S",
    )
