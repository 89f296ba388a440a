"""Decode steps as captured graphs: an NPU replays one at a launch, where the host would launch each operator by itself.

A graph has fixed shapes and fixed addresses. So one is captured for each of a few numbers of requests
(`capture_sizes`), its inputs and its output lie in buffers that stay, and a decode step (one new token a request) is
padded to the next size. What a graph holds is the decoder alone: copies, loads and stores of a Step, the head and
sampling stay outside.

Two things need care:

- Lengths. `npu_fused_infer_attention_score` takes them as host integers, which a capture would freeze. They are set
  anew at each replay, by torch_npu's own record of the operators of a graph (torch_npu 2.13.0, npu/graphs.py:
  `_GraphDispatchMode` puts a task group around each, and `NPUGraph.update` is graph_task_update_begin/end around
  another call with other lengths; vllm-ascend does so by hand, compilation/acl_graph.py). A graph whose lengths could
  not be set anew is never used.
- Padding. A padded row is a request of one token whose KV is in a spare block: the pool's tensors have as many of them
  as padded rows may need slots, beyond the blocks that the scheduler knows of. So no padded row can write where a
  request's KV is, or read it, and no two rows write to one slot.

Axis letters are those of `attention/base.py`; D is the hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from reprise_engine.attention.base import AttentionMetadata
from reprise_engine.errors import RepriseError
from reprise_engine.runner.batch import Batch

logger = logging.getLogger(__name__)

DecoderForward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]
"""(input_ids_1T, position_ids_1T, metadata) → hidden_TD."""


class CannotCapture(RepriseError):
    """What was captured could not be replayed with other lengths."""


class CapturedGraph(Protocol):
    """Work recorded once, over fixed addresses."""

    def replay(self, *, query_ends: list[int], kv_lens: list[int]) -> None:
        """Does that work again, with these lengths: cumulative of the queries, of each request of the keys."""
        ...


class GraphCapturer(Protocol):
    """How a device captures."""

    def capture(self, forward: Callable[[], None]) -> CapturedGraph:
        """Runs `forward`, recording what it launches. Raises RuntimeError or CannotCapture, and leaves the device as it
        was, where that cannot be recorded."""
        ...


class NPUGraphCapturer:
    """Captures by `torch.npu.NPUGraph`; all graphs of one capturer share a pool of memory, as only one runs at a time.

    `npu` is the module torch.npu. `num_attentions` is how many attention operators a forward launches: as many must
    have been recorded with their lengths.
    """

    def __init__(self, npu: Any, *, num_attentions: int) -> None:
        self._npu = npu
        self._num_attentions = num_attentions
        self._stream = npu.Stream()
        self._pool = npu.graph_pool_handle()

    def capture(self, forward: Callable[[], None]) -> CapturedGraph:
        npu = self._npu
        npu.synchronize()
        graph = npu.NPUGraph()
        # What `torch.npu.graph(graph, auto_dispatch_capture=True)` does, which after a failed capture would leave its
        # stream and its mode in place for whatever runs next.
        graph.auto_dispatch_capture = True
        with npu.stream(self._stream):
            forward()  # operators set themselves up on their first run, which must not be captured
            npu.synchronize()
            graph.capture_begin(pool=self._pool)
            try:
                with graph.graph_dispatch_mode:
                    forward()
            except BaseException:
                with suppress(RuntimeError):  # of an invalidated capture the end fails too (507903), and says no cause
                    graph.capture_end()
                raise
            graph.capture_end()
        records = graph.graph_dispatch_mode.graph_dispatch_records
        refreshed = sum("actual_seq_lengths_kv" in record.kwargs for record in records)
        if refreshed != self._num_attentions:
            raise CannotCapture(
                f"of {self._num_attentions} attention operators {refreshed} could be given other lengths when replayed"
            )
        return _NPUGraph(npu, graph)


@dataclass(frozen=True, slots=True)
class _NPUGraph:
    npu: Any
    graph: Any

    def replay(self, *, query_ends: list[int], kv_lens: list[int]) -> None:
        # A task of the last replay that has yet to run would see the new lengths.
        self.npu.current_stream().synchronize()
        self.graph.update(cpu_update_input=[{"actual_seq_lengths": query_ends, "actual_seq_lengths_kv": kv_lens}])
        self.graph.replay()


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of requests to capture, ascending, the last of them `max_num_seqs`: 1, 2, 4, multiples of 8 below 256, of
    16 from there, as vLLM's defaults."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 16))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def wanted_sizes(
    *, enforce_eager: bool, can_capture: bool, environment: Mapping[str, str], max_num_seqs: int
) -> tuple[int, ...]:
    """Sizes to capture on an NPU, () for eager steps only: asked for, or where the chip (310P) or the model (a mixture)
    cannot be captured, or where operators are to be launched one by one or by two queues, which no capture allows
    (torch_npu, NPUGraph.cpp, NPUGraph::capture_begin)."""
    if enforce_eager:
        return ()
    if not can_capture:
        logger.info("decode steps run eagerly: this chip, or this model, captures no graphs")
        return ()
    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        logger.info("decode steps run eagerly: ASCEND_LAUNCH_BLOCKING is 1")
        return ()
    if environment.get("TASK_QUEUE_ENABLE") == "2":
        logger.info("decode steps run eagerly: TASK_QUEUE_ENABLE is 2, and only with 0 or 1 are graphs captured")
        return ()
    return capture_sizes(max_num_seqs)


def spare_blocks(sizes: tuple[int, ...], *, block_size: int) -> int:
    """Blocks that padded rows of graphs of these sizes need."""
    return -(-max(sizes, default=0) // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """What the captured graphs read and write: the first `size` rows of each, whichever graph runs.

    input_ids_1T, position_ids_1T, slot_mapping_T   int64          block_table_RM   int32
    """

    input_ids_1T: torch.Tensor
    position_ids_1T: torch.Tensor
    slot_mapping_T: torch.Tensor
    block_table_RM: torch.Tensor
    block_size: int
    first_spare: int

    @classmethod
    def allocate(
        cls, rows: int, *, max_model_len: int, block_size: int, first_spare: int, device: torch.device
    ) -> _Buffers:
        buffers = cls(
            input_ids_1T=torch.zeros((1, rows), dtype=torch.int64, device=device),
            position_ids_1T=torch.zeros((1, rows), dtype=torch.int64, device=device),
            slot_mapping_T=torch.zeros(rows, dtype=torch.int64, device=device),
            block_table_RM=torch.full(
                (rows, -(-max_model_len // block_size)), first_spare, dtype=torch.int32, device=device
            ),
            block_size=block_size,
            first_spare=first_spare,
        )
        buffers.pad(0, rows)
        return buffers

    def pad(self, first: int, end: int) -> None:
        """Makes rows [first, end) requests of one token in the spare blocks, each in a slot of its own."""
        if first == end:
            return
        self.input_ids_1T[:, first:end] = 0
        self.position_ids_1T[:, first:end] = 0
        start = self.first_spare * self.block_size
        slots_T = torch.arange(start, start + end - first, device=self.slot_mapping_T.device)
        self.slot_mapping_T[first:end] = slots_T
        self.block_table_RM[first:end, 0] = slots_T // self.block_size

    def fill(self, batch: Batch) -> None:
        """Copies the batch to the first rows. Ids to the right of a table of its own are old ones, never read."""
        metadata = batch.metadata
        rows, columns = metadata.block_table_RM.shape
        self.input_ids_1T[:, :rows].copy_(batch.input_ids_1T)
        self.position_ids_1T[:, :rows].copy_(batch.position_ids_1T)
        self.slot_mapping_T[:rows].copy_(metadata.slot_mapping_T)
        self.block_table_RM[:rows, :columns].copy_(metadata.block_table_RM)

    def metadata(self, size: int, *, kv_len: int) -> AttentionMetadata:
        """Of `size` rows with as many keys each. Prefixes are not shared: who shares them changes from step to step."""
        return AttentionMetadata(
            slot_mapping_T=self.slot_mapping_T[:size],
            block_table_RM=self.block_table_RM[:size],
            query_lens=(1,) * size,
            kv_lens=(kv_len,) * size,
            block_size=self.block_size,
        )


class DecodeGraphs:
    """The captured graphs of one runner, by number of requests."""

    def __init__(self, graphs: Mapping[int, CapturedGraph], buffers: _Buffers, hidden_RD: torch.Tensor) -> None:
        self._graphs = dict(sorted(graphs.items()))
        self._buffers = buffers
        self._hidden_RD = hidden_RD

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._graphs)

    def run(self, batch: Batch) -> torch.Tensor | None:
        """hidden_TD of a decode step, valid until the next one; None for a step that no graph is for."""
        rows = len(batch.metadata.query_lens)
        if batch.input_ids_1T.shape[1] != rows:  # more tokens than requests: not all of them decode
            return None
        size = next((size for size in self._graphs if size >= rows), None)
        if size is None:
            return None
        self._buffers.fill(batch)
        self._buffers.pad(rows, size)
        self._graphs[size].replay(
            query_ends=list(range(1, size + 1)), kv_lens=[*batch.metadata.kv_lens, *(1,) * (size - rows)]
        )
        return self._hidden_RD[:rows]


def capture_decode_graphs(
    forward: DecoderForward,
    capturer: GraphCapturer,
    sizes: tuple[int, ...],
    *,
    max_model_len: int,
    block_size: int,
    first_spare: int,
    device: torch.device,
) -> DecodeGraphs | None:
    """Captures a graph for each of `sizes`, the largest first, so that the smaller ones fit the memory it has taken.
    From block `first_spare` on the pool has `spare_blocks` of them.

    Where one cannot be captured, neither it nor the smaller ones are there, with one warning: steps are padded to those
    that are. None where there is none.
    """
    buffers = _Buffers.allocate(
        max(sizes), max_model_len=max_model_len, block_size=block_size, first_spare=first_spare, device=device
    )
    graphs: dict[int, CapturedGraph] = {}
    hidden_RD: torch.Tensor | None = None
    with torch.inference_mode():
        for size in sorted(sizes, reverse=True):
            try:
                # With as many keys as a request may have: the operator's workspace is then large enough for any.
                step = _Step(forward, buffers, size, buffers.metadata(size, kv_len=max_model_len))
                if hidden_RD is None:
                    hidden_RD = torch.empty_like(step.run())
                graphs[size] = capturer.capture(partial(step.write, hidden_RD))
            except (RuntimeError, CannotCapture) as error:
                _warn(error, size, list(graphs))
                break
    if hidden_RD is None or not graphs:
        return None
    return DecodeGraphs(graphs, buffers, hidden_RD)


@dataclass(frozen=True, slots=True)
class _Step:
    """What is captured: the decoder on the first `size` rows of the buffers."""

    forward: DecoderForward
    buffers: _Buffers
    size: int
    metadata: AttentionMetadata

    def run(self) -> torch.Tensor:
        buffers = self.buffers
        return self.forward(
            buffers.input_ids_1T[:, : self.size], buffers.position_ids_1T[:, : self.size], self.metadata
        )

    def write(self, out_RD: torch.Tensor) -> None:
        out_RD[: self.size].copy_(self.run())


_CAUSE_LIMIT = 300
_STREAMS = (
    "207008",
    "stream resources are insufficient",
    "insufficient_stream_resources",
    # Where an event asks for a further stream (hicann/runtime, capture_model_utils.cc, api_impl_capture_event.cc;
    # reported to vllm-ascend in issues 9564 and 9596).
    "207005",
    "capture stream failed",
)
_OLD_DRIVER = ("alloc sq cq fail",)


def _warn(error: Exception, size: int, captured: list[int]) -> None:
    consequence = (
        f"Decode steps of fewer than {min(captured)} requests are padded to that"
        if captured
        else "Decode steps run eagerly, operator by operator"
    )
    cause = " ".join(str(error).split())[:_CAUSE_LIMIT]
    logger.warning("%s: capturing a graph of %d failed: %s. %s", consequence, size, cause.rstrip("."), _advice(error))


def _advice(error: Exception) -> str:
    """What helps, where the driver's words are known (those that vllm-ascend looks for in compilation/acl_graph.py)."""
    words = str(error).lower()
    if any(sign in words for sign in _OLD_DRIVER):
        return "The driver is older than this CANN: install Ascend HDK 25.5.1 or later."
    if any(sign in words for sign in _STREAMS):
        return "The device has no streams left: lower --max-num-seqs, so that fewer graphs are captured."
    return "--enforce-eager says beforehand that none are wanted."
