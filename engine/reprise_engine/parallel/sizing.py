"""How many blocks fit where several ranks have a part of each: pure, over what each rank saw (memory.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reprise_engine.config import CacheConfig
from reprise_engine.errors import InsufficientMemory, OutOfMemory
from reprise_engine.memory import BlockShape, KVPlan, MemoryFacts, plan_kv_blocks


def plan_for_ranks(
    facts: Sequence[MemoryFacts],
    shape: BlockShape,
    cache: CacheConfig,
    *,
    max_model_len: int,
    max_model_len_is_explicit: bool,
    max_num_seqs: int,
) -> KVPlan:
    """The number of blocks that every rank has room for; `shape` is that of one rank's part. Raises what
    `plan_kv_blocks` raises, for the first rank whose memory does not suffice.

    On a CPU the ranks share one memory, so there is one plan for all; each NPU has its own, and the smallest counts.
    """
    host_tier = sum(each.host_tier for each in facts)
    if facts[0].device == "cpu":
        together = replace(
            facts[0],
            weights=sum(each.weights for each in facts),
            process=sum(each.process for each in facts),
            activations=sum(each.activations for each in facts),
            host_tier=host_tier,
        )
        all_parts = replace(shape, bytes_per_block=len(facts) * shape.bytes_per_block)
        pots = [(together, all_parts)]
    else:
        pots = [(replace(each, host_tier=host_tier), shape) for each in facts]
    plans: list[KVPlan] = []
    for rank, (memory, block) in enumerate(pots):
        try:
            plans.append(
                plan_kv_blocks(
                    memory,
                    block,
                    cache,
                    max_model_len=max_model_len,
                    max_model_len_is_explicit=max_model_len_is_explicit,
                    max_num_seqs=max_num_seqs,
                )
            )
        except InsufficientMemory as error:
            raise InsufficientMemory(f"{_on(rank, len(pots))}{error}") from error
        except OutOfMemory as error:
            # Whoever watches reads how the message begins (out_of_memory.py).
            raise OutOfMemory(f"{error}{f' (rank {rank})' if len(pots) > 1 else ''}") from error
    return min(plans, key=lambda plan: plan.num_blocks)


def _on(rank: int, count: int) -> str:
    return f"Rank {rank} of {count}: " if count > 1 else ""
