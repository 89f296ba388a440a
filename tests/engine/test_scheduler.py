from __future__ import annotations

import pickle

import pytest

from reprise_engine.config import SchedulerConfig
from reprise_engine.errors import ConfigError, ContextLengthExceeded, NotFinite, RequestError
from reprise_engine.request import EngineRequest, FinishReason, RequestId, RequestTimes, SamplingParams, TokenId
from reprise_engine.scheduler import Scheduler
from reprise_engine.step import Step, StepResult
from tests.engine.paged_fake import World


def shape(step: Step) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of each part, in order."""
    return [(part.request_id, part.start, len(part.token_ids)) for part in step.requests]


# --- batching, budget, order


def test_decoding_goes_on_while_a_prompt_is_computed_in_chunks() -> None:
    world = World(max_num_batched_tokens=8)
    short = world.add([1, 2], max_tokens=6)
    long = world.add(range(10, 30), max_tokens=2)
    assert shape(world.step()) == [(short, 0, 2), (long, 0, 6)]
    assert shape(world.step()) == [(short, 2, 1), (long, 6, 7)]
    assert shape(world.step()) == [(short, 3, 1), (long, 13, 7)]
    assert shape(world.step()) == [(short, 4, 1), (long, 20, 1)]
    world.drain()
    world.check_finished(short)
    world.check_finished(long)


def test_only_the_last_chunk_is_sampled() -> None:
    world = World(max_num_batched_tokens=4)
    long = world.add(range(10))
    assert [world.step().requests[0].samples for _ in range(3)] == [False, False, True]
    assert len(world.outputs[long]) == 1


def test_without_chunks_a_prompt_is_computed_whole_and_not_delayed_by_decoding() -> None:
    world = World(enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=16)
    first = world.add([1, 2], max_tokens=6)
    world.step()
    second = world.add(range(15))
    assert shape(world.step()) == [(second, 0, 15), (first, 2, 1)]
    third, fourth = world.add(range(20, 35)), world.add(range(40, 55))
    assert shape(world.step()) == [(third, 0, 15), (first, 3, 1)]
    assert shape(world.step()) == [(fourth, 0, 15), (first, 4, 1)]


def test_without_chunks_the_budget_must_hold_the_longest_prompt() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens is 15; .* at least max_model_len \(16\)"):
        World(enable_chunked_prefill=False, max_num_batched_tokens=15, max_model_len=16)


def test_no_more_run_than_seats_or_than_tokens_of_a_step() -> None:
    for world in (World(max_num_seqs=2), World(max_num_batched_tokens=2)):
        requests = [world.add([i], max_tokens=3) for i in range(3)]
        world.step()
        assert (world.scheduler.stats().num_running, world.scheduler.stats().num_waiting) == (2, 1)
        world.drain()
        for request_id in requests:
            world.check_finished(request_id)


def test_priority_comes_before_arrival() -> None:
    world = World(max_num_seqs=1)
    late = world.add([1], priority=1)
    early = world.add([2], priority=0)
    world.now += 1
    urgent = world.add([3], priority=-1)
    assert [world.step().requests[0].request_id for _ in range(3)] == [urgent, early, late]


def test_a_long_prompt_does_not_hold_up_one_of_higher_priority() -> None:
    world = World(max_num_batched_tokens=8)
    long = world.add(range(30), priority=1)
    world.step()
    urgent = world.add([40, 41, 42], priority=0)
    later = world.add([50], priority=2)
    assert shape(world.step()) == [(urgent, 0, 3), (long, 8, 5)]
    world.drain()
    for request_id in (long, urgent, later):
        world.check_finished(request_id)


def test_without_chunks_too_every_running_request_gets_its_token_each_step() -> None:
    world = World(enable_chunked_prefill=False, max_num_batched_tokens=4, max_model_len=4, max_num_seqs=8)
    for i in range(8):
        world.add([i], max_tokens=3)
    assert [len(world.step().requests) for _ in range(3)] == [4, 4, 4]
    assert world.scheduler.stats().num_waiting == 4


def test_a_request_that_waits_for_blocks_is_not_overtaken() -> None:
    world = World(num_blocks=8, block_size=4)
    running = world.add(range(20), max_tokens=4)  # five blocks, then six
    world.step()
    large = world.add(range(30, 46))  # four: one too many
    small = world.add([50])  # would fit
    assert shape(world.step()) == [(running, 20, 1)]
    world.drain()
    assert shape(world.runner.steps[-1]) == [(large, 0, 16), (small, 0, 1)]


def test_requests_sharing_a_prefix_wait_for_the_first_to_compute_it() -> None:
    world = World(max_num_batched_tokens=32)
    prefix = list(range(12))
    first, second, third = (world.add([*prefix, 20 + i, 30]) for i in range(3))
    other = world.add([40] * 3)
    assert shape(world.step()) == [(first, 0, 14), (other, 0, 3)]
    assert shape(world.step()) == [(second, 12, 2), (third, 12, 2)]
    assert (world.cached(second), world.cached(third)) == (12, 12)
    # Three blocks for the shared tokens, however many share them, and four unfinished ones.
    assert world.scheduler.stats().num_cached_blocks == 3 + 4


def test_nobody_waits_for_a_request_behind_it() -> None:
    world = World(max_num_batched_tokens=8)
    prefix = list(range(12))
    behind = world.add([*prefix, 1], priority=1)
    world.step()
    urgent = world.add([*prefix, 2], priority=0)
    assert shape(world.step()) == [(urgent, 8, 5), (behind, 8, 3)]
    world.drain()
    world.check_finished(behind)
    world.check_finished(urgent)


# --- ends of a request


def run_with(sampling: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3), eos: tuple[int, ...] = ()) -> World:
    world = World()
    world.add(prompt, sampling=sampling, eos=eos)
    world.drain()
    return world


def free_tokens(count: int) -> list[int]:
    """What the prompt of run_with generates when nothing ends it."""
    return run_with(SamplingParams(max_tokens=count)).tokens(RequestId("r0"))


def test_an_end_token_ends_it_and_is_reported() -> None:
    tokens = free_tokens(4)
    for sampling, eos in (
        (SamplingParams(max_tokens=9), (tokens[2],)),
        (SamplingParams(max_tokens=9, stop_token_ids=(tokens[2],)), ()),
        (SamplingParams(max_tokens=9, stop_token_ids=(tokens[2],), ignore_eos=True), (tokens[1],)),
        (SamplingParams(max_tokens=3), (tokens[2],)),  # stop wins where both are true
    ):
        world = run_with(sampling, eos=eos)
        last = world.outputs[RequestId("r0")][-1]
        assert world.tokens(RequestId("r0")) == tokens[:3]
        assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, tokens[2])


def test_max_tokens_ends_it_by_length() -> None:
    last = run_with(SamplingParams(max_tokens=4)).outputs[RequestId("r0")][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.LENGTH, None)


def test_end_tokens_are_forbidden_below_min_tokens() -> None:
    end = free_tokens(1)[0]
    world = run_with(SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=(49,)), eos=(end,))
    forbidden = [step.requests[0].forbidden_token_ids for step in world.runner.steps]
    assert forbidden[:2] == [tuple(sorted((49, end)))] * 2
    assert set(forbidden[2:]) <= {()}
    assert len(world.tokens(RequestId("r0"))) >= 3
    world.check_finished(RequestId("r0"))


def test_without_max_tokens_a_request_ends_where_the_context_or_the_pool_ends() -> None:
    for world, length in ((World(max_model_len=20), 20), (World(num_blocks=4, block_size=4), 16)):
        request_id = world.add([1, 2, 3], sampling=SamplingParams())
        world.drain()
        assert len(world.tokens(request_id)) == length - 3


# --- what a Step and an output carry


def test_a_step_is_complete_and_picklable() -> None:
    world = World(max_num_batched_tokens=2)
    sampling = SamplingParams(max_tokens=3, repetition_penalty=1.2, seed=7)
    request_id = world.add([1, 2, 3], sampling=sampling)
    first, second, third = world.step(), world.step(), world.step()
    assert first.requests[0].history is None  # not sampled: nothing to penalise yet
    assert second.requests[0].history == (1, 2, 3)
    part = third.requests[0]
    assert part.history == (1, 2, 3, world.tokens(request_id)[0])
    assert (part.prompt_length, part.output_index, part.sampling) == (3, 1, sampling)
    assert pickle.loads(pickle.dumps(third)) == third


def test_the_block_table_is_made_anew_only_when_it_grows() -> None:
    world = World(block_size=4)
    world.add([1, 2], max_tokens=6)
    tables = [world.step().requests[0].block_table for _ in range(6)]
    assert tables[0] is tables[1] is tables[2]
    assert [len(table) for table in tables] == [1, 1, 1, 2, 2, 2]


def test_outputs_carry_times_and_token_counts() -> None:
    world = World(max_num_batched_tokens=2)
    request_id = world.add([1, 2, 3], max_tokens=2)
    world.now = 101.0
    world.drain()
    first, last = world.outputs[request_id]
    assert first.times == RequestTimes(arrival=100.0, first_scheduled=101.0, first_token=103.0, last_token=103.0)
    assert last.times == RequestTimes(arrival=100.0, first_scheduled=101.0, first_token=103.0, last_token=104.0)
    assert (first.prompt_tokens, first.cached_tokens) == (3, 0)


# --- the cache through the scheduler


def test_skipping_the_cache_computes_everything_and_counts_nothing() -> None:
    world = World()
    world.run(range(12))
    before = world.scheduler.stats()
    request_id = world.add(range(12), sampling=SamplingParams(max_tokens=6, skip_reading_prefix_cache=True))
    assert shape(world.step()) == [(request_id, 0, 12)]
    world.drain()
    world.check_finished(request_id)
    assert world.cached(request_id) == 0
    assert world.scheduler.stats().prefix_cache_queries == before.prefix_cache_queries
    assert world.scheduler.stats().prefix_cache_hits == 0
    assert not {block for step in world.runner.steps[1:] for block in step.requests[0].block_table} & {0, 1, 2}


def test_what_a_skipping_request_computed_first_is_cached_for_others() -> None:
    world = World()
    world.add(range(12), sampling=SamplingParams(max_tokens=1, skip_reading_prefix_cache=True))
    world.drain()
    assert world.cached(world.run([*range(12), 20])) == 12


def test_with_the_cache_off_nothing_is_kept_or_counted() -> None:
    world = World(enable_prefix_caching=False)
    first, second = world.run(range(12), max_tokens=5), world.run(range(12), max_tokens=5)
    assert world.tokens(first) == world.tokens(second)
    assert world.cached(second) == 0
    stats = world.scheduler.stats()
    assert (stats.num_cached_blocks, stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0, 0)


def test_a_salt_that_is_no_valid_text_is_a_salt_like_any_other() -> None:
    world = World()
    world.run(range(8), salt="\ud800")
    assert world.cached(world.run([*range(8), 1], salt="\ud800")) == 8
    assert world.cached(world.run([*range(8), 1], salt="\ud801")) == 0


def test_blocks_of_one_token_need_no_copy() -> None:
    world = World(block_size=1, num_blocks=20)
    world.run([1, 2, 3])
    request_id = world.add([1, 2, 3], max_tokens=4)
    step = world.step()
    assert step.copies == ()
    assert shape(step) == [(request_id, 2, 1)]
    world.drain()
    world.check_finished(request_id)


def test_reset_frees_what_is_not_in_use() -> None:
    world = World()
    world.run(range(8))
    request_id = world.add(range(20, 28), max_tokens=3)
    world.step()
    assert world.scheduler.reset_prefix_cache() == (False, 2)
    world.drain()
    world.check_finished(request_id)
    assert world.cached(world.run(range(8))) == 0
    assert world.scheduler.reset_prefix_cache() == (True, 5)  # two blocks, and two with an unfinished third
    assert world.scheduler.stats().num_cached_blocks == 0
    assert world.scheduler.stats().num_evicted_blocks == 0  # a reset is no eviction


# --- aborts


def test_abort_while_waiting_running_and_in_the_step() -> None:
    world = World(max_num_seqs=2)
    running, flying, waiting = (world.add(range(i, i + 9), max_tokens=20) for i in (0, 10, 20))
    world.step()
    (output,) = world.scheduler.abort([waiting])
    assert (output.finish_reason, output.prompt_tokens, output.new_token_ids) == (FinishReason.ABORT, 9, ())
    world.scheduler.abort([running])
    world.scheduler.check_invariants()
    step = world.schedule()
    assert step is not None
    assert len(world.scheduler.abort([flying])) == 1
    assert world.scheduler.has_work()  # its step is still running
    assert world.scheduler.abort([flying, waiting, RequestId("unknown")]) == ()
    assert world.commit(step) == ()
    assert not world.scheduler.has_work()
    assert world.scheduler.stats().kv_cache_usage == 0.0
    assert world.schedule() is None
    assert world.cached(world.run([*range(10, 18), 1])) == 8  # what the aborted one computed was not in vain


def test_abort_of_a_copying_request_gives_its_source_back() -> None:
    world = World()
    world.run(range(8))
    request_id = world.add(range(8), max_tokens=5)
    step = world.schedule()
    assert step is not None
    assert len(step.copies) == 1
    world.scheduler.abort([request_id])
    world.commit(step)
    assert world.scheduler.stats().kv_cache_usage == 0.0


# --- refusals


def request(prompt: tuple[int, ...], sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(request_id=RequestId("x"), prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0)


def scheduler(num_blocks: int = 4, max_model_len: int = 64) -> Scheduler:
    return Scheduler(
        SchedulerConfig(), num_blocks=num_blocks, block_size=4, enable_prefix_caching=True, max_model_len=max_model_len
    )


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message", "param"),
    [
        ((), 1, "The prompt is empty", "prompt"),
        ((1, -1), 1, "token id", "prompt"),
        ((1, 2**32), 1, "token id", "prompt"),
        ((1,), 0, "max_tokens is 0; it must be at least 1", "max_tokens"),
        ((1,) * 16, None, "17 together; the whole KV cache holds 16", "prompt"),
        ((1,) * 9, 8, "The prompt has 9 tokens and max_tokens is 8, 17 together; the whole KV", "max_tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(
    prompt: tuple[int, ...], max_tokens: int | None, message: str, param: str
) -> None:
    refusing = scheduler()
    with pytest.raises(RequestError, match=message) as caught:
        refusing.add(request(prompt, SamplingParams(max_tokens=max_tokens)))
    assert caught.value.param == param
    assert isinstance(caught.value, ContextLengthExceeded) == (caught.value.code == "context_length_exceeded")
    assert isinstance(caught.value, ContextLengthExceeded) == ("together" in message)
    assert not refusing.has_work()
    refusing.add(request((1,) * 9, SamplingParams(max_tokens=7)))  # just fits


def test_the_context_length_is_a_limit_too() -> None:
    with pytest.raises(ContextLengthExceeded, match="context length is 10"):
        scheduler(max_model_len=10).add(request((1,) * 9, SamplingParams(max_tokens=2)))


def test_an_id_in_use_is_refused() -> None:
    refusing = scheduler()
    refusing.add(request((1,), SamplingParams(max_tokens=1)))
    with pytest.raises(RequestError, match="'x' is in use"):
        refusing.add(request((1,), SamplingParams(max_tokens=1)))


def test_steps_are_committed_one_by_one() -> None:
    one = scheduler()
    one.add(request((1,), SamplingParams(max_tokens=1)))
    step = one.schedule(0.0)
    assert step is not None
    with pytest.raises(RuntimeError, match="step 1 is not committed yet"):
        one.schedule(0.0)
    with pytest.raises(RuntimeError, match="not awaited"):
        one.commit(step, StepResult(step_id=2, sampled={}), 0.0)


def test_what_was_computed_without_finite_numbers_is_nobody_s_prefix() -> None:
    one = scheduler()
    for error in (NotFinite("no numbers"), None):
        one.add(request((1,) * 9, SamplingParams(max_tokens=1)))
        step = one.schedule(0.0)
        assert step is not None
        assert step.requests[0].start == 0, "the prefix of the one that failed was read"
        errors = {} if error is None else {RequestId("x"): error}
        result = StepResult(step_id=step.step_id, sampled={RequestId("x"): TokenId(3)}, errors=errors)
        (output,) = one.commit(step, result, 0.0)
        assert output.error is error
    one.add(request((1,) * 9, SamplingParams(max_tokens=1)))
    again = one.schedule(0.0)
    assert again is not None
    assert again.requests[0].start == 8, "the prefix of the one that succeeded was not read"
