"""Which requests of a step have their common prefix read once (cascade attention). Pure; free of torch.

Requests that begin with the same blocks form a tree. A group of n requests that read a common prefix of L tokens once
instead of n times saves (n - 1)·L token reads; a request is in one group at most, and the groups chosen save the most.
(The cascade of one level in FlashInfer, Ye et al. 2024, with the groups found instead of given.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from reprise_engine.attention.base import SharedPrefix

# Token reads that a group must save: below, the second pass over the group costs more (docs/cpu-performance.md).
LEAST_SAVING = 256
# A request with more new tokens computes so long on each key that reading it is nothing.
MOST_NEW_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request of the step: its index, its blocks, and how many of them are whole and were filled before the step."""

    request: int
    blocks: Sequence[int]
    num_filled: int


def find_shared_prefixes(
    candidates: Sequence[Candidate], *, block_size: int, least_saving: int = LEAST_SAVING
) -> tuple[SharedPrefix, ...]:
    """Disjoint groups, of those that save the most. Each saves at least `least_saving` token reads."""
    groups: list[SharedPrefix] = []
    by_first = sorted((c for c in candidates if c.num_filled), key=lambda c: c.blocks[0])
    for _, sharing in groupby(by_first, key=lambda c: c.blocks[0]):
        members = list(sharing)
        if len(members) > 1:
            _, found = _best(members, 1, least_saving=-(-least_saving // block_size))
            groups += [SharedPrefix(requests, blocks * block_size) for requests, blocks in found]
    return tuple(groups)


_Groups = list[tuple[tuple[int, ...], int]]


def _best(members: list[Candidate], depth: int, *, least_saving: int) -> tuple[int, _Groups]:
    """(block reads saved, groups as (requests, blocks)) for members that agree in their first `depth` blocks."""
    depth = _agreement(members, depth)
    together = (len(members) - 1) * depth
    apart, groups = 0, []
    going_on = sorted((c for c in members if c.num_filled > depth), key=lambda c: c.blocks[depth])
    for _, sharing in groupby(going_on, key=lambda c: c.blocks[depth]):
        branch = list(sharing)
        if len(branch) > 1:
            saved, found = _best(branch, depth + 1, least_saving=least_saving)
            apart += saved
            groups += found
    if together > apart:
        requests = tuple(sorted(c.request for c in members))
        return (together, [(requests, depth)]) if together >= least_saving else (0, [])
    return apart, groups


def _agreement(members: list[Candidate], depth: int) -> int:
    """How many leading blocks, at least `depth`, all members have in common."""
    first = members[0].blocks
    end = min(c.num_filled for c in members)
    for other in members[1:]:
        if list(first[depth:end]) == list(other.blocks[depth:end]):
            continue
        end = next(i for i in range(depth, end) if first[i] != other.blocks[i])
    return end
