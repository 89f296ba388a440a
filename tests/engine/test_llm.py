"""The offline interface: prompts in their forms, sampling, chat, cached tokens, and refusals before anything runs."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reprise_engine import LLM, SamplingParams
from reprise_engine.cache_report import MissReason
from reprise_engine.config import SchedulerConfig
from reprise_engine.errors import ConfigError, ContextLengthExceeded, InsufficientMemory, RequestError
from reprise_engine.step import Step, StepResult
from tests.support.tiny_models import BOS_ID, VOCAB_SIZE, tiny_model_path

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TEXT = "The quick brown fox jumps over the lazy dog."


def make_llm(family: str = "qwen3", **options: Any) -> LLM:
    defaults: dict[str, Any] = {"num_gpu_blocks_override": 64, "block_size": 8}
    return LLM(model=str(tiny_model_path(family)), **(defaults | options))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(TEXT)
    outputs = [
        *llm.generate(TEXT, GREEDY),
        *llm.generate([TEXT], GREEDY),
        *llm.generate({"prompt": TEXT}, GREEDY),
        *llm.generate(list(ids), GREEDY),
        *llm.generate([list(ids)], GREEDY),
        *llm.generate({"prompt_token_ids": ids}, GREEDY),
    ]
    assert len(outputs) == 6
    assert {output.prompt_token_ids for output in outputs} == {ids}
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [TEXT, TEXT, TEXT, None, None, None]
    [first] = outputs[0].outputs
    assert first.text == llm.get_tokenizer().decode([*ids, *first.token_ids])[len(TEXT) :]
    assert first.finish_reason == "length"
    assert len(first.token_ids) == 8


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[5, 6, 7], [9] * 30, [4]]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (7, 2, 4)]
    outputs = llm.generate(prompts, params)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [7, 2, 4]
    assert len({output.request_id for output in outputs}) == 3


def test_a_repeated_prompt_is_found_in_the_cache_unless_caching_is_off() -> None:
    prompt = list(range(10, 50))
    warm = make_llm()
    cold = make_llm(enable_prefix_caching=False)
    assert warm.config.enable_prefix_caching
    assert not cold.config.enable_prefix_caching
    outputs = [llm.generate(prompt, GREEDY)[0] for llm in (warm, warm, cold, cold)]
    # 40 tokens are 5 whole blocks of 8; one token is always computed.
    assert [output.num_cached_tokens for output in outputs] == [0, 39, 0, 0]
    assert len({output.outputs[0].token_ids for output in outputs}) == 1
    assert (warm.stats.prefix_cache_queries, warm.stats.prefix_cache_hits) == (80, 39)
    explained = [output.cache_explanation for output in outputs]
    reasons = [None if explanation is None else explanation.reason for explanation in explained]
    assert reasons == [MissReason.NOT_SEEN, None, MissReason.CACHING_OFF, MissReason.CACHING_OFF]
    assert None not in explained
    assert warm.reset_prefix_cache()
    assert warm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_an_empty_cache_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"prefix_cache_dir is empty; give a folder, or None"):
        make_llm(prefix_cache_dir="")
    assert list(tmp_path.iterdir()) == []


def test_it_ends_soon_though_another_process_has_locked_the_cache_folder(tmp_path: Path) -> None:
    llm = make_llm(prefix_cache_dir=tmp_path)
    journal = os.open(tmp_path / "reprise-kv-v1" / "journal", os.O_RDWR)
    try:
        fcntl.flock(journal, fcntl.LOCK_EX)
        llm.generate(list(range(10, 50)), GREEDY)
        begun = time.monotonic()
        llm.close()
        assert time.monotonic() - begun < 4.0, "it waits for the lock as long as for the disk"
    finally:
        os.close(journal)


def test_a_seed_repeats_and_requests_without_one_differ(llm: LLM) -> None:
    def texts(*params: SamplingParams) -> list[tuple[int, ...]]:
        return [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7]] * len(params), params)]

    seeded = SamplingParams(temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)
    free = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    one, two, three, four = texts(seeded, seeded, free, free)
    assert one == two
    assert three != four
    assert texts(seeded) == [one]


def test_stop_token_and_end_of_sequence(llm: LLM) -> None:
    [free] = llm.generate([5, 6, 7], GREEDY)
    third = free.outputs[0].token_ids[2]
    [stopped] = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(third,)))
    assert stopped.outputs[0].token_ids == free.outputs[0].token_ids[:3]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", third)


def test_stop_string_ends_the_text_before_it_and_frees_the_request(llm: LLM) -> None:
    [free] = llm.generate(TEXT, GREEDY)
    text = free.outputs[0].text
    stop = text[3:5]
    [stopped] = llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=(stop,)))
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert llm.stats.num_running == 0


def test_logprobs_are_returned_when_asked_for(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)
    [asked, plain] = [llm.generate([5, 6, 7], p)[0].outputs[0] for p in (params, GREEDY)]
    assert plain.logprobs is None
    assert asked.logprobs is not None
    assert [entry.token_id for entry in asked.logprobs] == list(asked.token_ids)
    assert all(entry.rank == 1 and len(entry.top) == 2 and entry.logprob < 0 for entry in asked.logprobs)


def test_chat_renders_the_template_and_the_next_turn_hits_the_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()
    messages = [{"role": "system", "content": TEXT * 3}, {"role": "user", "content": "Paris?"}]
    [first] = llm.chat(messages, GREEDY)
    assert first.prompt is not None
    assert first.prompt.endswith("<|im_start|>user\nParis?<|im_end|>\n<|im_start|>assistant\n")
    assert first.prompt_token_ids[0] == BOS_ID
    again = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"}]
    [second] = llm.chat(again, GREEDY)
    shared = len(first.prompt_token_ids)
    assert shared - 8 < second.num_cached_tokens <= shared
    both = llm.chat([messages, again], GREEDY)
    assert [output.prompt for output in both] == [first.prompt, second.prompt]


def test_completions_default_to_16_tokens_and_chats_to_the_end_of_the_context() -> None:
    llm = make_llm(max_model_len=64)
    endless = SamplingParams(temperature=0.0, ignore_eos=True)
    assert len(llm.generate([5, 6], endless)[0].outputs[0].token_ids) == 16
    [chat] = llm.chat([{"role": "user", "content": "Hi"}], endless)
    assert len(chat.prompt_token_ids) + len(chat.outputs[0].token_ids) == 64
    assert chat.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([5, VOCAB_SIZE], f"token id {VOCAB_SIZE}.*0 to {VOCAB_SIZE - 1}"),
        ([-1], "token id -1"),
        ({"text": "a"}, "`prompt` or `prompt_token_ids`"),
    ],
)
def test_a_bad_prompt_is_refused_before_the_others_run(llm: LLM, prompt: Any, message: str) -> None:
    before = llm.stats.prefix_cache_queries
    with pytest.raises(RequestError, match=message):
        llm.generate([[5, 6, 7], prompt], GREEDY)
    assert llm.stats.prefix_cache_queries == before
    assert llm.stats.num_waiting == 0


def test_too_long_a_prompt_names_the_limit() -> None:
    llm = make_llm(max_model_len=32)
    with pytest.raises(ContextLengthExceeded, match=r"32 tokens.*max_model_len 32"):
        llm.generate([5] * 32, GREEDY)
    assert len(llm.generate([5] * 31, GREEDY)[0].outputs[0].token_ids) == 1


def test_sampling_params_are_one_for_all_or_one_each(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate([[5], [6], [7]], [GREEDY, GREEDY])


def test_without_a_tokenizer_token_ids_work_and_text_does_not() -> None:
    llm = make_llm(skip_tokenizer_init=True)
    [output] = llm.generate([5, 6, 7], GREEDY)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 8
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.generate("text", GREEDY)
    with pytest.raises(RequestError, match="stop"):
        llm.generate([5], SamplingParams(stop=("x",)))


def test_after_a_failing_step_the_next_call_starts_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    runner = llm._core._runner
    monkeypatch.setattr(type(runner), "run", _fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.generate([[5, 6], [7, 8]], GREEDY)
    monkeypatch.undo()
    assert len(llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids) == 8
    assert (llm.stats.num_running, llm.stats.num_waiting, llm.stats.kv_cache_usage) == (0, 0, 0.0)


def _fail(_runner: object, _step: Step) -> StepResult:
    raise RuntimeError("the device is gone")


def test_unknown_arguments_and_bad_values_are_refused() -> None:
    with pytest.raises(TypeError, match="enable_prefix_cacheing"):
        make_llm(enable_prefix_cacheing=True)
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization is 1\.5"):
        make_llm(gpu_memory_utilization=1.5)
    with pytest.raises(ConfigError, match="--device is npu, but torch_npu is not installed"):
        make_llm(device="npu")
    with pytest.raises(ConfigError, match="--dtype is 'half'; it must be one of auto, float32,"):
        make_llm(dtype="half")
    with pytest.raises(ConfigError, match="--device is 'gpu'; it must be one of auto, cpu, npu"):
        make_llm(device="gpu")
    with pytest.raises(ConfigError, match="--prefix-caching-hash-algo is 'md5'; it must be one of sha256,"):
        make_llm(prefix_caching_hash_algo="md5")
    with pytest.raises(ConfigError, match="--max-num-batched-tokens is 16"):
        make_llm(enable_chunked_prefill=False, max_num_batched_tokens=16)
    with pytest.raises(InsufficientMemory, match="raise --num-gpu-blocks-override to 25"):
        make_llm(max_model_len=200, num_gpu_blocks_override=24)


def test_without_chunked_prefill_a_step_holds_the_longest_prompt_unasked() -> None:
    """Also where the model alone says how long that is."""
    llm = make_llm(
        enable_chunked_prefill=False, num_gpu_blocks_override=None, kv_cache_memory_bytes=2**27, max_num_seqs=2
    )
    short = make_llm(enable_chunked_prefill=False, max_model_len=64)
    assert llm.config.max_num_batched_tokens == max(2048, llm.config.max_model_len)
    assert short.config.max_num_batched_tokens == 2048
    assert SchedulerConfig(enable_chunked_prefill=False).batched_tokens(max_model_len=8192) == 8192
    assert SchedulerConfig(enable_chunked_prefill=True).batched_tokens(max_model_len=8192) == 2048
    assert SchedulerConfig(max_num_batched_tokens=9).batched_tokens(max_model_len=8192) == 9


def test_more_tokens_at_least_than_at_most_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"min_tokens is 9, more than max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)
    with pytest.raises(RequestError, match=r"min_tokens is 17, more than max_tokens \(16\)"):
        llm.generate([5], SamplingParams(min_tokens=17))
    [exact] = llm.generate([5], SamplingParams(min_tokens=8, max_tokens=8))
    assert len(exact.outputs[0].token_ids) == 8


def test_blocks_are_named_as_asked() -> None:
    """To the outside only: the same prompt is found under either name."""
    prompt = list(range(10, 50))
    for algorithm in ("sha256_cbor", "xxhash"):
        llm = make_llm(prefix_caching_hash_algo=algorithm)
        assert [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 39]


def test_what_the_engine_settled_on_is_told() -> None:
    config = make_llm("opt").config
    assert (config.block_size, config.num_gpu_blocks, config.max_model_len) == (8, 64, 512)
    assert (config.device, config.dtype, config.vocab_size, config.eos_token_ids) == (
        "cpu",
        "float32",
        VOCAB_SIZE,
        (1, 2),
    )


def test_stops_may_be_one_string_and_lists(llm: LLM) -> None:
    assert SamplingParams(stop="cat").stop == ("cat",)  # type: ignore[arg-type]
    lists = SamplingParams(stop=["a", "b"], stop_token_ids=[7])  # type: ignore[arg-type]
    assert (lists.stop, lists.stop_token_ids) == (("a", "b"), (7,))
    [whole] = llm.generate(TEXT, GREEDY)
    text = whole.outputs[0].text
    stop = text[-3:]
    [stopped] = llm.generate(TEXT, replace(GREEDY, stop=stop))  # type: ignore[arg-type]
    assert stopped.outputs[0].stop_reason == stop
    assert stopped.outputs[0].text == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", -1.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 5.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("stop", ("a", "")),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_a_stop_token_outside_the_vocabulary_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match=f"stop_token_ids holds {VOCAB_SIZE}; .* 0 to {VOCAB_SIZE - 1}"):
        llm.generate([5], SamplingParams(stop_token_ids=(VOCAB_SIZE,), min_tokens=2, max_tokens=4))
