"""Turn n + 1 of a conversation computes only what is new, wherever in a block the turns before it ended."""

from __future__ import annotations

import pytest

from tests.engine.paged_fake import World

BLOCK = 8


@pytest.mark.parametrize("prompt_length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK])
@pytest.mark.parametrize("answer_length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("budget", [64, 5], ids=["whole", "chunks"])
def test_every_turn_computes_what_is_new_and_the_token_that_nobody_computed(
    prompt_length: int, answer_length: int, budget: int
) -> None:
    world = World(num_blocks=40, block_size=BLOCK, max_num_batched_tokens=budget, max_model_len=200)
    history = [3 + i % 40 for i in range(prompt_length)]
    known = 0
    for turn in range(4):
        request_id = world.run(history, max_tokens=answer_length)
        world.check_finished(request_id)
        assert world.cached(request_id) == known, f"turn {turn}"
        # The last token of an answer is sampled, never computed: it is the first one that the next turn computes.
        known = len(history) + answer_length - 1
        history += [*world.tokens(request_id), *(10 + turn + i for i in range(turn + 1))]


def test_a_regenerated_answer_computes_one_token() -> None:
    world = World(num_blocks=40, block_size=BLOCK, max_model_len=200)
    prompt = list(range(11))
    world.run(prompt, max_tokens=5)
    for _ in range(2):
        request_id = world.run(prompt, max_tokens=9)
        world.check_finished(request_id)
        assert world.cached(request_id) == 10


def test_an_edited_message_reuses_everything_before_the_edit() -> None:
    world = World(num_blocks=40, block_size=BLOCK, max_model_len=200)
    first = list(range(21))
    world.run(first, max_tokens=3)
    for edited_at in (0, 1, 7, 8, 13, 20):
        edited = [*first[:edited_at], 45, *first[edited_at + 1 :]]
        request_id = world.run(edited, max_tokens=2)
        world.check_finished(request_id)
        assert world.cached(request_id) == edited_at


def test_a_template_that_rewrites_the_last_answer_keeps_what_is_before_it() -> None:
    world = World(num_blocks=40, block_size=BLOCK, max_model_len=200)
    prompt = list(range(13))
    answer = world.tokens(world.run(prompt, max_tokens=9))
    request_id = world.run([*prompt, *answer[4:], 1, 2, 3])  # as one that drops the reasoning of past turns
    assert world.cached(request_id) == 13 + next(i for i in range(5) if answer[i] != answer[4 + i])


def test_a_turn_finds_the_last_one_after_a_preemption_as_well() -> None:
    world = World(num_blocks=5, block_size=4, max_model_len=20)
    first, second = world.add([1, 2, 3], max_tokens=12), world.add([5, 6, 7], max_tokens=12)
    world.drain()
    assert world.scheduler.stats().num_preemptions > 0
    world.check_finished(first)
    world.check_finished(second)
    history = [5, 6, 7, *world.tokens(second)]
    request_id = world.run([*history, 9])
    world.check_finished(request_id)
    assert world.cached(request_id) == len(history) - 1


def test_an_aborted_answer_leaves_what_was_computed() -> None:
    world = World(block_size=BLOCK)
    request_id = world.add([1, 2, 3, 4, 5], max_tokens=30)
    for _ in range(3):
        world.step()
    answer = world.tokens(request_id)
    world.scheduler.abort([request_id])
    world.scheduler.check_invariants()
    assert world.cached(world.run([1, 2, 3, 4, 5, *answer, 9])) == 7


def test_choices_of_one_short_prompt_share_it_once_the_first_is_done() -> None:
    world = World(block_size=BLOCK)
    world.run([1, 2, 3, 4, 5])
    choices = [world.add([1, 2, 3, 4, 5], max_tokens=6) for _ in range(3)]
    step = world.schedule()
    assert step is not None
    assert {copy.source for copy in step.copies} == {0}
    assert len({copy.target for copy in step.copies}) == 3
    world.commit(step)
    world.drain()
    for request_id in choices:
        world.check_finished(request_id)
        assert world.cached(request_id) == 4
