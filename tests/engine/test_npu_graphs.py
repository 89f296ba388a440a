"""Decode steps replayed from captured graphs say what eager ones say, write where those write, and give way to them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from reprise_engine.attention.npu import NPUAttention
from reprise_engine.config import ModelConfig
from reprise_engine.models.loader import LoadedModel, load_model
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.runner.npu_graphs import NPUGraphCapturer, capture_sizes
from reprise_engine.step import BlockCopy, BlockId, ScheduledRequest, Step
from tests.engine.npu_ops import npu_operators
from tests.support.fake_npu_graphs import FakeNPU, Recorder
from tests.support.tiny_models import VOCAB_SIZE, tiny_model_path

CPU = torch.device("cpu")
BLOCK_SIZE = 128
NUM_BLOCKS = 16
MAX_MODEL_LEN = 384
SIZES = (1, 2, 4, 6)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    with npu_operators():
        yield


@cache
def loaded(family: str) -> LoadedModel:
    return load_model(ModelConfig(model=str(tiny_model_path(family)), dtype="float32"), device=CPU)


class Bench:
    """A runner on a pool of its own, and the sequences it has been given."""

    def __init__(self, family: str = "qwen3") -> None:
        model = loaded(family)
        self.layers = model.spec.num_layers
        self.kv = allocate_kv_cache(
            num_layers=self.layers,
            num_blocks=NUM_BLOCKS + 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=model.spec.num_kv_heads,
            head_dim=model.spec.head_dim,
            dtype=model.kv_dtype,
            device=CPU,
        )
        self.runner = ModelRunner(model, NPUAttention(CPU), self.kv, seed=0, num_spare_blocks=1)
        self.sequences: dict[str, list[int]] = {}
        self.tables: dict[str, tuple[int, ...]] = {}

    def capture(self, npu: FakeNPU, sizes: tuple[int, ...] = SIZES) -> tuple[int, ...]:
        capturer = NPUGraphCapturer(npu, num_attentions=self.layers)
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
def told_eagerly(family: str) -> dict[str, list[int]]:
    return story(Bench(family))


def test_the_sizes_are_vllms_and_end_with_the_most_that_may_run() -> None:
    assert capture_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert capture_sizes(1) == (1,)
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert capture_sizes(300)[-6:] == (240, 248, 256, 272, 288, 300)


@pytest.mark.parametrize("family", ["qwen2", "qwen2-sliding", "qwen3", "llama"])
def test_the_same_tokens_with_and_without_graphs(family: str) -> None:
    bench, npu = Bench(family), FakeNPU()
    assert bench.capture(npu) == SIZES
    assert story(bench) == told_eagerly(family)
    assert npu.replays == 10, "every decode step, and not the prefill"
    assert npu.updates[4] == {"actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": [131, 132]}
    assert npu.updates[5] == {"actual_seq_lengths": [1, 2, 3, 4], "actual_seq_lengths_kv": [133, 132, 12, 1]}
    assert npu.streams == [], "the capturing stream is nobody's afterwards"


def test_lengths_that_stayed_as_captured_would_be_noticed() -> None:
    bench = Bench()
    bench.capture(FakeNPU(forgets_updates=True))
    assert story(bench) != told_eagerly("qwen3")


def test_padded_rows_write_to_the_spare_block_alone() -> None:
    bench, npu = Bench(), FakeNPU()
    bench.capture(npu)
    bench.prefill(**PROMPTS)
    for layer in bench.kv:  # a value that no model computes, wherever nothing is to be written
        layer.key_BSKH[NUM_BLOCKS:].fill_(7.5)
    before = [layer.key_BSKH.clone() for layer in bench.kv]
    bench.decode("a", "b", "c", "d", "e")  # padded to six
    for layer, old in zip(bench.kv, before, strict=True):
        written = (layer.key_BSKH != old).flatten(2).any(-1).nonzero().tolist()
        own = [[bench.tables[name][length // BLOCK_SIZE], length % BLOCK_SIZE] for name, length in PROMPTS.items()]
        assert sorted(written) == sorted([*own, [NUM_BLOCKS, 0]])


def test_the_spare_block_is_nobodys() -> None:
    bench = Bench()
    bench.sequences["x"], bench.tables["x"] = [5], (NUM_BLOCKS,)
    with pytest.raises(ValueError, match=f"outside the pool of {NUM_BLOCKS} blocks"):
        bench.decode("x")


def test_copies_of_a_step_are_done_before_the_replay() -> None:
    """A decode into a copy of a shared block: the copy is part of the step, not of the graph."""
    told = []
    for graphs in (False, True):
        bench = Bench()
        if graphs:
            bench.capture(FakeNPU())
        bench.prefill(a=40)
        shared = bench.tables["a"][0]
        bench.sequences["a"].append(9)
        bench.tables["a"] = (12,)
        bench.run(bench.part("a", start=41), copies=(BlockCopy(source=BlockId(shared), target=BlockId(12)),))
        told.append(bench.sequences["a"])
    assert told[0] == told[1]


def test_what_no_graph_is_for_is_run_eagerly() -> None:
    bench, npu = Bench(), FakeNPU()
    assert bench.capture(npu, (1, 2)) == (1, 2)
    assert story(bench) == told_eagerly("qwen3")
    assert npu.replays == 4, "of the steps with one or two requests"
    bench.sequences["a"] += [5, 6]
    starts = {"a": len(bench.sequences["a"]) - 3, "b": len(bench.sequences["b"]) - 1}
    bench.run(*(bench.part(name, start=start) for name, start in starts.items()))
    assert npu.replays == 4, "two requests, but one of them has three tokens"


def test_without_graphs_there_is_one_warning_and_the_same_tokens(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    npu = FakeNPU(
        capture_error=lambda _n: RuntimeError("capture_begin: error code is 107027.\n [Error]: The capture …")
    )
    with caplog.at_level(logging.WARNING):
        assert bench.capture(npu) == ()
    (warning,) = caplog.messages
    assert warning.startswith("Decode steps run eagerly, operator by operator: capturing a graph of 6 failed: ")
    assert "error code is 107027. [Error] …" in warning
    assert warning.endswith("--enforce-eager says beforehand that none are wanted.")
    assert story(bench) == told_eagerly("qwen3")
    assert npu.replays == 0
    assert npu.streams == []


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            "capture_begin:../torch_npu/csrc/core/npu/NPUGraph.cpp:230 NPU function error: "
            "c10_npu::acl::AclmdlRICaptureBegin(capture_stream_, capture_mode), error code is 207008\n"
            "[Error]: Stream resources are insufficient.",
            "lower --max-num-seqs",
        ),
        ("[drv api] Alloc sq cq fail, drvRetCode=12", "install Ascend HDK 25.5.1"),
        ("NPU out of memory. Tried to allocate 20.00 MiB", "--enforce-eager"),
    ],
)
def test_graphs_that_were_captured_stay_where_a_smaller_one_fails(
    words: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    npu = FakeNPU(capture_error=lambda number: RuntimeError(words) if number == 3 else None)
    assert bench.capture(npu) == (4, 6)
    (warning,) = caplog.messages
    assert warning.startswith("Decode steps of fewer than 4 requests are padded to that: capturing a graph of 2 ")
    assert advice in warning
    assert "\n" not in warning
    assert story(bench) == told_eagerly("qwen3")
    assert npu.replays == 10, "smaller steps are padded further"


def test_a_forward_that_waits_for_the_device_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    """Routing that asks on the host which experts have tokens."""

    bench, npu = Bench(), FakeNPU()
    decode = bench.runner._decode

    def waiting(*arguments: torch.Tensor) -> torch.Tensor:
        hidden_TD = decode(*arguments)  # type: ignore[arg-type]
        assert hidden_TD.abs().sum().item() > 0
        return hidden_TD

    bench.runner._decode = waiting  # type: ignore[method-assign, assignment]
    assert bench.capture(npu) == ()
    assert "not permitted during NPU graph capture" in caplog.text
    assert not npu.capturing, "the capture has been ended"
    assert torch.ones(2).sum().item() == 2, "nothing records any more"


def test_a_graph_whose_lengths_cannot_be_set_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    class Blind(Recorder):
        """As a release of torch_npu that knows another operator."""

        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self.graph_dispatch_records.clear()
            return result

    bench = Bench()
    assert bench.capture(FakeNPU(new_recorder=Blind)) == ()
    assert "of 3 attention operators 0 could be given other lengths" in caplog.text
    assert story(bench) == told_eagerly("qwen3")
