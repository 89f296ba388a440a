"""Rank 0's runner: every step goes to the other ranks first, so that all of them compute it."""

from __future__ import annotations

from reprise_engine.loop import Runner
from reprise_engine.parallel.group import Group
from reprise_engine.parallel.launch import Ranks
from reprise_engine.parallel.talk import for_others
from reprise_engine.step import Step, StepResult


def meet_after_transfers(step: Step, group: Group) -> None:
    """On every rank at the end of a step: its slots may then be used by the disk's threads, or be written anew."""
    if step.stores or step.loads:
        group.barrier()


class LeadingRunner:
    """`inner` computes rank 0's part of a step, and samples."""

    def __init__(self, inner: Runner, ranks: Ranks, group: Group) -> None:
        self._inner = inner
        self._ranks = ranks
        self._group = group

    def run(self, step: Step) -> StepResult:
        """As Runner. Raises RankDied, or OutOfMemory of another rank, where one is gone; then no step can be run any
        more, nor after another error."""
        self._ranks.tell(for_others(step))
        try:
            result = self._inner.run(step)
            meet_after_transfers(step, self._group)
            return result
        except Exception as error:
            cause = self._ranks.explain(error)
            self._ranks.give_up(f"A step failed on rank 0: {error}.")
            if cause is error:
                raise
            raise cause from error
        except BaseException:  # Ctrl-C in a notebook
            self._ranks.give_up("A step was interrupted while several ranks computed it.")
            raise
