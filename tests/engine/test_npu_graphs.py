"""Decode steps replayed from captured graphs say what eager ones say, write where those write, and give way to them."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch

from reprise_engine.attention.npu import NPUAttention
from reprise_engine.attention.npu_chip import Chip
from reprise_engine.config import DType, ModelConfig
from reprise_engine.models.loader import LoadedModel, load_model
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.runner.npu_graphs import NPUGraphCapturer, capture_sizes, spare_blocks, wanted_sizes
from reprise_engine.step import BlockCopy, BlockId, ScheduledRequest, Step
from tests.support.fake_npu_graphs import FakeNPU, Recorder
from tests.support.npu.wheel import WheelMissing, read
from tests.support.npu_device import NPUUnderTest
from tests.support.tiny_models import VOCAB_SIZE, tiny_model_path

BLOCK_SIZE = 128
NUM_BLOCKS = 16
MAX_MODEL_LEN = 384
SIZES = (1, 2, 4, 6)
GREEDY = SamplingParams(temperature=0.0)


@cache
def loaded(family: str, device: torch.device, dtype: DType) -> LoadedModel:
    return load_model(ModelConfig(model=str(tiny_model_path(family)), dtype=dtype), device=device)


def fake(ascend: NPUUnderTest, **behaviour: Any) -> FakeNPU:
    """A device that can be told how to behave."""
    if ascend.real:
        pytest.skip("a real NPU does as it likes")
    return FakeNPU(**behaviour)


class Bench:
    """A runner on a pool of its own, and the sequences it has been given."""

    def __init__(self, ascend: NPUUnderTest, family: str = "qwen3") -> None:
        if ascend.chip is Chip.P310:
            pytest.skip("a 310P captures no graphs")
        model = loaded(family, ascend.device, ascend.dtype)
        self.layers = model.spec.num_layers
        self.kv = allocate_kv_cache(
            num_layers=self.layers,
            num_blocks=NUM_BLOCKS + 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=model.spec.num_kv_heads,
            head_dim=model.spec.head_dim,
            dtype=model.kv_dtype,
            device=ascend.device,
        )
        self.runner = ModelRunner(model, NPUAttention(ascend.device), self.kv, seed=0, num_spare_blocks=1)
        self.sequences: dict[str, list[int]] = {}
        self.tables: dict[str, tuple[int, ...]] = {}

    def capture(self, device: Any, sizes: tuple[int, ...] = SIZES) -> tuple[int, ...]:
        capturer = NPUGraphCapturer(device, num_attentions=self.layers)
        graphs = self.runner.capture_decode_graphs(capturer, sizes, max_model_len=MAX_MODEL_LEN)
        return () if graphs is None else graphs.sizes

    def part(self, name: str, *, start: int) -> ScheduledRequest:
        return ScheduledRequest(
            request_id=RequestId(name),
            token_ids=tuple(self.sequences[name][start:]),
            start=start,
            block_table=tuple(BlockId(block) for block in self.tables[name]),
            samples=True,
            sampling=GREEDY,
        )

    def run(self, *parts: ScheduledRequest, copies: tuple[BlockCopy, ...] = ()) -> None:
        result = self.runner.run(Step(step_id=1, requests=parts, copies=copies))
        for request_id, token in result.sampled.items():
            self.sequences[request_id].append(token)

    def prefill(self, **lengths: int) -> None:
        for number, (name, length) in enumerate(lengths.items()):
            generator = torch.Generator().manual_seed(number)
            self.sequences[name] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
            self.tables[name] = (2 * number + 1, 2 * number)
        self.run(*(self.part(name, start=0) for name in lengths))

    def decode(self, *names: str) -> None:
        self.run(*(self.part(name, start=len(self.sequences[name]) - 1) for name in names))


PROMPTS = {"a": 7, "b": 126, "c": 40, "d": 127, "e": 1}


def story(bench: Bench) -> dict[str, list[int]]:
    """Requests that come and go, over the border of a block, in batches of every size up to six."""
    bench.prefill(**PROMPTS)
    for _ in range(4):
        bench.decode("a", "b", "c", "d", "e")
    bench.decode("b", "d")
    bench.decode("d", "b", "a")
    for _ in range(3):
        bench.decode("c")
    bench.decode("e", "d", "c", "b")
    return bench.sequences


@cache
def told_eagerly(ascend: NPUUnderTest, family: str = "qwen3") -> dict[str, list[int]]:
    return story(Bench(ascend, family))


def test_the_sizes_are_vllms_and_end_with_the_most_that_may_run() -> None:
    assert capture_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert capture_sizes(1) == (1,)
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert capture_sizes(300)[-6:] == (240, 248, 256, 272, 288, 300)
    assert [spare_blocks(sizes, block_size=128) for sizes in ((), (1,), (1, 128), (1, 129))] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("enforce_eager", "can_capture", "environment", "sizes"),
    [
        (False, True, {"ASCEND_LAUNCH_BLOCKING": "0", "TASK_QUEUE_ENABLE": "1"}, (1, 2, 4)),
        (False, True, {"TASK_QUEUE_ENABLE": "0"}, (1, 2, 4)),
        (True, True, {}, ()),
        (False, False, {}, ()),  # a 310P
        (False, True, {"ASCEND_LAUNCH_BLOCKING": "1"}, ()),
        (False, True, {"TASK_QUEUE_ENABLE": "2"}, ()),
    ],
)
def test_when_graphs_are_wanted(
    enforce_eager: bool, can_capture: bool, environment: dict[str, str], sizes: tuple[int, ...]
) -> None:
    found = wanted_sizes(enforce_eager=enforce_eager, can_capture=can_capture, environment=environment, max_num_seqs=4)
    assert found == sizes


def test_two_task_queues_cannot_be_captured(ascend: NPUUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none are asked for, as torch_npu refuses each."""
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    with pytest.raises(RuntimeError, match="Do not support TASK_QUEUE_ENABLE = 2"):
        NPUGraphCapturer(fake(ascend), num_attentions=0).capture(lambda: None)


@pytest.mark.parametrize("family", ["qwen2", "qwen2-sliding", "qwen3", "llama"])
def test_the_same_tokens_with_and_without_graphs(ascend: NPUUnderTest, family: str) -> None:
    bench, device = Bench(ascend, family), ascend.graphs()
    assert bench.capture(device) == SIZES
    assert story(bench) == told_eagerly(ascend, family)
    if ascend.real:
        return
    assert device.replays == 10, "every decode step, and not the prefill"
    assert device.updates[4] == {"actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": [131, 132]}
    assert device.updates[5] == {"actual_seq_lengths": [1, 2, 3, 4], "actual_seq_lengths_kv": [133, 132, 12, 1]}
    assert device.streams == [], "the capturing stream is nobody's afterwards"


def test_lengths_that_stayed_as_captured_would_be_noticed(ascend: NPUUnderTest) -> None:
    bench = Bench(ascend)
    bench.capture(fake(ascend, forgets_updates=True))
    assert story(bench) != told_eagerly(ascend)


def test_padded_rows_write_to_the_spare_block_alone(ascend: NPUUnderTest) -> None:
    bench = Bench(ascend)
    bench.capture(ascend.graphs())
    bench.prefill(**PROMPTS)
    for layer in bench.kv:  # a value that no model computes, wherever nothing is to be written
        layer.key_BSKH[NUM_BLOCKS:].fill_(7.5)
    before = [layer.key_BSKH.clone() for layer in bench.kv]
    bench.decode("a", "b", "c", "d", "e")  # padded to six
    for layer, old in zip(bench.kv, before, strict=True):
        written = (layer.key_BSKH != old).flatten(2).any(-1).nonzero().tolist()
        own = [[bench.tables[name][length // BLOCK_SIZE], length % BLOCK_SIZE] for name, length in PROMPTS.items()]
        assert sorted(written) == sorted([*own, [NUM_BLOCKS, 0]])


def test_the_spare_block_is_nobodys(ascend: NPUUnderTest) -> None:
    bench = Bench(ascend)
    bench.sequences["x"], bench.tables["x"] = [5], (NUM_BLOCKS,)
    with pytest.raises(ValueError, match=f"outside the pool of {NUM_BLOCKS} blocks"):
        bench.decode("x")


def test_copies_of_a_step_are_done_before_the_replay(ascend: NPUUnderTest) -> None:
    """A decode into a copy of a shared block: the copy is part of the step, not of the graph."""
    told = []
    for graphs in (False, True):
        bench = Bench(ascend)
        if graphs:
            bench.capture(ascend.graphs())
        bench.prefill(a=40)
        (shared, _) = bench.tables["a"]
        bench.tables["a"] = (12,)
        bench.run(bench.part("a", start=40), copies=(BlockCopy(source=BlockId(shared), target=BlockId(12)),))
        told.append(bench.sequences["a"])
    assert told[0] == told[1]
    assert len(told[0]) == 42


def test_what_no_graph_is_for_is_run_eagerly(ascend: NPUUnderTest) -> None:
    bench, device = Bench(ascend), fake(ascend)
    assert bench.capture(device, (1, 2)) == (1, 2)
    assert story(bench) == told_eagerly(ascend)
    assert device.replays == 4, "of the steps with one or two requests"
    bench.sequences["a"] += [5, 6]
    starts = {"a": len(bench.sequences["a"]) - 3, "b": len(bench.sequences["b"]) - 1}
    bench.run(*(bench.part(name, start=start) for name, start in starts.items()))
    assert device.replays == 4, "two requests, but one of them has three tokens"


def test_without_graphs_there_is_one_warning_and_the_same_tokens(
    ascend: NPUUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(ascend)
    device = fake(ascend, capture_error=lambda _n: RuntimeError("capture_begin: error code is 107027.\n [Error] …"))
    with caplog.at_level(logging.WARNING):
        assert bench.capture(device) == ()
    (warning,) = caplog.messages
    assert warning.startswith("Decode steps run eagerly, operator by operator: capturing a graph of 6 failed: ")
    assert "error code is 107027. [Error] …" in warning
    assert warning.endswith("--enforce-eager says beforehand that none are wanted.")
    assert story(bench) == told_eagerly(ascend)
    assert device.replays == 0
    assert device.streams == []


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            "capture_begin:../torch_npu/csrc/core/npu/NPUGraph.cpp:230 NPU function error: "
            "c10_npu::acl::AclmdlRICaptureBegin(capture_stream_, capture_mode), error code is 207008\n"
            "[Error]: Stream resources are insufficient.",
            "lower --max-num-seqs",
        ),
        # Of reports to vllm-ascend: issues 9564 and 9596.
        ("NPU function error: AclmdlRICaptureEnd, error code is 207005", "lower --max-num-seqs"),
        ("EL0009: New capture stream failed, resource alloc fail, retCode=0x7020016", "lower --max-num-seqs"),
        ("[drv api] Alloc sq cq fail, drvRetCode=12", "install Ascend HDK 25.5.1"),
        ("NPU out of memory. Tried to allocate 20.00 MiB", "--enforce-eager"),
    ],
)
def test_graphs_that_were_captured_stay_where_a_smaller_one_fails(
    ascend: NPUUnderTest, words: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(ascend)
    device = fake(ascend, capture_error=lambda number: RuntimeError(words) if number == 3 else None)
    assert bench.capture(device) == (4, 6)
    (warning,) = caplog.messages
    assert warning.startswith("Decode steps of fewer than 4 requests are padded to that: capturing a graph of 2 ")
    assert advice in warning
    assert "\n" not in warning
    bench.prefill(a=7)
    bench.decode("a")
    assert bench.sequences["a"] == told_eagerly(ascend)["a"][:9]
    assert device.updates == [{"actual_seq_lengths": [1, 2, 3, 4], "actual_seq_lengths_kv": [8, 1, 1, 1]}]


def test_a_forward_that_waits_for_the_device_is_not_captured(
    ascend: NPUUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as routing that asks on the host which experts have tokens."""
    device = fake(ascend)

    def waiting() -> None:
        assert torch.ones(1).item() == 1

    with pytest.raises(RuntimeError, match="not permitted during NPU graph capture"):
        NPUGraphCapturer(device, num_attentions=0).capture(waiting)
    assert not device.capturing, "the capture has been ended, which was an error as well, but a consequence"
    assert device.streams == []
    waiting()  # nothing records any more


def test_work_is_run_once_before_it_is_captured(ascend: NPUUnderTest) -> None:
    """Operators set themselves up on their first run."""
    device, seen = fake(ascend), list[bool]()
    NPUGraphCapturer(device, num_attentions=0).capture(lambda: seen.append(device.capturing))
    assert seen == [False, True]


def test_captured_with_as_many_keys_as_a_request_may_have(ascend: NPUUnderTest) -> None:
    """The operator's workspace, whose size is taken then, must do for any step."""
    recorders: list[Recorder] = []

    def recorder() -> Recorder:
        recorders.append(Recorder())
        return recorders[-1]

    bench = Bench(ascend)
    bench.capture(fake(ascend, new_recorder=recorder), (1, 4))
    captured = [record.kwargs["actual_seq_lengths_kv"] for made in recorders for record in made.graph_dispatch_records]
    assert captured == [[MAX_MODEL_LEN] * 4] * bench.layers + [[MAX_MODEL_LEN]] * bench.layers


def test_a_graph_whose_lengths_cannot_be_set_is_not_used(
    ascend: NPUUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    class Blind(Recorder):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        """As a release of torch_npu that knows another operator."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self.graph_dispatch_records.clear()
            return result

    bench = Bench(ascend)
    assert bench.capture(fake(ascend, new_recorder=Blind)) == ()
    assert "of 3 attention operators 0 could be given other lengths" in caplog.text
    bench.prefill(a=7)
    bench.decode("a")
    assert bench.sequences["a"] == told_eagerly(ascend)["a"][:9]


@pytest.mark.parametrize(
    "needed",
    [
        "class NPUGraph(",
        "def update(self, cpu_update_input)",
        "self.graph_dispatch_mode = ",
        "self.auto_dispatch_capture = ",
        "self.graph_dispatch_records = []",
        "def capture_begin(self, pool=None,",
        "def graph_pool_handle()",
        "if key in record.kwargs:\n                        record.kwargs[key] = update_input[key]",
        "graph_task_update_begin(self.update_stream, record.handle)",
    ],
)
def test_torch_npu_has_what_capturing_rests_on(needed: str) -> None:
    try:
        source = read("torch_npu/npu/graphs.py").decode()
    except WheelMissing as missing:
        pytest.skip(str(missing))
    assert needed in source


def test_torch_npu_keeps_records_of_the_attention_operator() -> None:
    try:
        source = read("torch_npu/npu/_npugraph_handlers/ifa_handler.py").decode()
    except WheelMissing as missing:
        pytest.skip(str(missing))
    assert '"npu_fused_infer_attention_score.default"' in source
