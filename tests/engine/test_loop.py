from __future__ import annotations

from reprise_engine.config import SchedulerConfig
from reprise_engine.errors import ContextLengthExceeded
from reprise_engine.loop import EngineCore
from reprise_engine.request import EngineRequest, FinishReason, RequestId, SamplingParams
from reprise_engine.scheduler import Scheduler
from tests.engine.paged_fake import PagedFakeRunner, expected_output


def make_core() -> EngineCore:
    scheduler = Scheduler(SchedulerConfig(), num_blocks=8, block_size=4, enable_prefix_caching=True, max_model_len=32)
    return EngineCore(scheduler, PagedFakeRunner(num_blocks=8, block_size=4), clock=lambda: 5.0)


def make_request(name: str, prompt: range, max_tokens: int = 3) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_time=1.0,
    )


def test_the_loop_generates_until_there_is_no_work() -> None:
    core = make_core()
    requests = [make_request("a", range(5)), make_request("b", range(9))]
    assert core.submit(requests) == ()
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while core.has_work():
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
            assert output.times is not None
            assert output.times.first_token == 5.0
    assert tokens == {request.request_id: expected_output(request)[0] for request in requests}
    assert core.step() == ()


def test_a_refused_request_is_an_output_and_stops_nobody_else() -> None:
    core = make_core()
    (refused,) = core.submit([make_request("long", range(40)), make_request("good", range(5))])
    assert refused.request_id == "long"
    assert isinstance(refused.error, ContextLengthExceeded)
    assert refused.finished
    assert [output.request_id for output in core.step()] == ["good"]


def test_abort_and_reset_go_through_the_loop() -> None:
    core = make_core()
    core.submit([make_request("a", range(8), max_tokens=20)])
    core.step()
    assert core.reset_prefix_cache() == (False, 0)
    (output,) = core.abort([RequestId("a")])
    assert output.finish_reason is FinishReason.ABORT
    assert not core.has_work()
    assert core.stats().num_cached_blocks == 2
    assert core.reset_prefix_cache() == (True, 2)
