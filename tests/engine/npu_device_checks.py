"""Checks of the emulated device, for a process that has one: test_npu_emulation_device.py runs this file in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu  # type: ignore[import-not-found]  # the stand-in, which only that process finds

from tests.engine import npu_calls as calls
from tests.support.npu import NotSupportedByNpu
from tests.support.npu.device.tensor import NpuTensor
from tests.support.npu.machine import Chip

NPU = torch.device("npu", 0)
npu: Any = torch.npu  # type: ignore[attr-defined]
MIB = 1024**2


def on_npu(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(NPU) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def test_tensors_live_on_the_device_and_come_back() -> None:
    x = torch.arange(12.0).view(3, 4)
    y = (x.to(NPU) @ x.to("npu").T).relu()
    assert (y.device, y.is_cpu, y.shape) == (NPU, False, torch.Size((3, 3)))
    assert torch.equal(y.cpu(), (x @ x.T).relu())
    assert y.sum().item() == (x @ x.T).sum().item()
    assert torch.arange(3, device=NPU).tolist() == [0, 1, 2]
    assert torch.tensor([[1, 2]], device=NPU).tolist() == [[1, 2]]
    with pytest.raises(RuntimeError, match=r"numpy\(\) is not supported"):
        y.numpy()


def test_views_share_their_memory() -> None:
    x = torch.zeros(3, 4, device=NPU)
    x[1].fill_(7)
    x.T[0, 2] = 5
    assert x.tolist() == [[0] * 4, [7] * 4, [5, 0, 0, 0]]
    assert not x.T.is_contiguous()


def test_inference_mode_makes_no_difference() -> None:
    positions = torch.arange(4).to(NPU)
    with torch.inference_mode():
        doubled = positions[None, :].float() * 2
    doubled.add_(1)
    assert doubled.tolist() == [[1, 3, 5, 7]]


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(
        RuntimeError, match=r"at least two devices, npu:0 and cpu! \(argument other of aten.add.Tensor\)"
    ):
        torch.ones(3, device=NPU) + torch.ones(3)
    assert (torch.ones(3, device=NPU) + torch.tensor(1)).tolist() == [2, 2, 2]


def test_operators_work_on_the_device_under_both_names() -> None:
    call = calls.paged()
    out, _ = torch_npu.npu_fused_infer_attention_score(**on_npu(call))
    with pytest.raises(RuntimeError, match="argument block_table"):
        torch.ops.npu.npu_fused_infer_attention_score(**on_npu(call) | {"block_table": call["block_table"]})
    with pytest.raises(NotSupportedByNpu, match="FIA-DTYPE"):
        torch_npu.npu_fused_infer_attention_score(**on_npu(call) | {"query": torch.zeros(4, 4, 16, device=NPU)})
    assert out.device == NPU
    made = torch_npu.empty_with_format((2, 3), dtype=torch.float16, device=NPU, acl_format=29)
    assert (made.device, torch_npu.get_npu_format(made)) == (NPU, 29)
    with pytest.raises(NotImplementedError, match="npu_fusion_attention is not emulated"):
        torch_npu.npu_fusion_attention(out)


def test_torch_s_operations_are_not_for_formats_of_the_device_s_own() -> None:
    made = torch_npu.empty_with_format((3, 2, 16, 16), dtype=torch.float16, device=NPU, acl_format=29)
    host, index = torch.ones(2, 16, 16, dtype=torch.float16), torch.tensor([0, 2], device=NPU)
    for wrong in (
        lambda: made[1].copy_(host),
        lambda: host.copy_(made[1]),
        lambda: made[index],
        lambda: made.index_put_((index,), made[1].expand(2, 2, 16, 16)),
        made.zero_,
    ):
        with pytest.raises(NotSupportedByNpu, match="NZ-IS-FOR-OPERATORS"):
            wrong()


def test_dlpack_gives_the_same_memory_without_its_format() -> None:
    resting = npu.memory_allocated()
    made = torch_npu.empty_with_format((3, 2, 16, 16), dtype=torch.float16, device=NPU, acl_format=29)
    taken = npu.memory_allocated() - resting
    dlpack: Any = torch.utils.dlpack
    plain = dlpack.from_dlpack(dlpack.to_dlpack(made))
    assert (plain.device, torch_npu.get_npu_format(plain), torch_npu.get_npu_format(made)) == (NPU, 2, 29)
    plain.zero_()
    plain[1].copy_(torch.full((2, 16, 16), 3.0))
    assert npu.memory_allocated() - resting == taken
    del made
    assert npu.memory_allocated() - resting == taken, "the memory ended with its first tensor"
    assert plain.flatten(1).float().mean(1).tolist() == [0, 3, 0]


def test_a_310p_s_matrices_are_no_float32_and_its_operators_compiled_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NpuTensor.state, "chip", Chip.ASCEND_310P)
    wide = torch.ones(2, 3, device=NPU)
    narrow = wide.half()
    assert (narrow @ narrow.T).tolist() == [[3, 3], [3, 3]]
    with pytest.raises(NotSupportedByNpu, match="NO-FLOAT32-MATRICES-310P"):
        wide @ wide.T
    npu.set_compile_mode(jit_compile=True)
    with pytest.raises(NotSupportedByNpu, match="COMPILED-BEFOREHAND"):
        wide + 1
    npu.set_compile_mode(jit_compile=False)
    assert (wide + 1).sum().item() == 12


def test_memory_is_counted_by_storages() -> None:
    npu.empty_cache()
    resting = npu.memory_allocated()
    free, total = npu.mem_get_info()
    assert total == 64 * MIB
    x = torch.zeros(MIB, device=NPU)
    view = x[10:]
    assert npu.memory_allocated() - resting == 4 * MIB
    assert free - npu.mem_get_info()[0] == 4 * MIB
    del x
    assert npu.memory_allocated() - resting == 4 * MIB
    del view
    assert npu.memory_allocated() == resting
    assert npu.max_memory_allocated() - resting >= 4 * MIB
    npu.reset_peak_memory_stats()
    assert npu.max_memory_allocated() == resting


def test_a_full_device_says_so_in_torch_npus_words() -> None:
    kept = torch.zeros(9 * MIB, device=NPU)
    with pytest.raises(
        npu.OutOfMemoryError, match=r"NPU out of memory\. Tried to allocate 0\.03 GiB \(NPU 0; 0\.06 GiB total"
    ):
        torch.empty(8 * MIB, device=NPU)
    with pytest.raises(npu.OutOfMemoryError, match="NPU out of memory"):
        kept + 1
    assert npu.mem_get_info()[0] >= 16 * MIB


def test_a_captured_graph_computes_at_replay_from_the_captured_addresses() -> None:
    given = torch.zeros(2, 3, device=NPU)
    total = torch.zeros(2, device=NPU)
    graph = npu.NPUGraph()
    with npu.graph(graph):
        doubled = given[:, 1:] * 2
        total.add_(doubled.sum(-1))
    assert doubled.isnan().all()
    assert total.tolist() == [0, 0]
    given.copy_(torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    graph.replay()
    assert (doubled.tolist(), total.tolist()) == ([[4, 6], [10, 12]], [10, 22])
    graph.replay()
    assert total.tolist() == [20, 44]


def test_what_waits_for_the_device_is_not_captured() -> None:
    x = torch.ones(2, device=NPU)
    for waiting in (lambda: x.sum().item(), lambda: x.cpu(), lambda: x.tolist(), npu.synchronize):
        with pytest.raises(RuntimeError, match="error code is 507903") as ended, npu.graph(npu.NPUGraph()):
            waiting()
        assert "not permitted while a graph is captured" in str(ended.value.__context__)
    assert not npu.is_current_stream_capturing()


def test_lengths_stay_as_captured_until_their_task_group_is_updated() -> None:
    """Decode: one query for each of two sequences, first over 20 and 130 keys, then over 21 and 131."""
    first = on_npu(calls.paged(query=calls.half(2, 4, 16), actual_seq_lengths=[1, 2]))
    later = first | {"actual_seq_lengths_kv": [21, 131]}
    attention = torch.ops.npu.npu_fused_infer_attention_score
    before, after = attention(**first)[0].cpu(), attention(**later)[0].cpu()
    assert not torch.equal(before, after)
    graph, stream = npu.NPUGraph(), npu.current_stream()
    with npu.graph(graph):
        npu.graph_task_group_begin(stream)
        out, _ = attention(**first)
        handle = npu.graph_task_group_end(stream)
    graph.replay()
    assert torch.equal(out.cpu(), before)
    npu.graph_task_update_begin(stream, handle)
    attention(**later)
    npu.graph_task_update_end(stream)
    graph.replay()
    assert torch.equal(out.cpu(), after)


def test_an_update_that_does_not_fit_its_group_fails() -> None:
    x = torch.ones(2, 64, device=NPU)
    stream = npu.current_stream()
    with npu.graph(npu.NPUGraph()):
        npu.graph_task_group_begin(stream)
        torch_npu.npu_swiglu(x)
        handle = npu.graph_task_group_end(stream)
    npu.graph_task_update_begin(stream, handle)
    with pytest.raises(RuntimeError, match=r"cannot update a captured npu\.npu_swiglu"):
        torch_npu.npu_rms_norm(x, torch.ones(64, device=NPU))
    torch_npu.npu_swiglu(x)
    npu.graph_task_update_end(stream)
    npu.graph_task_update_begin(stream, handle)
    with pytest.raises(RuntimeError, match="1 tasks of the group were not updated"):
        npu.graph_task_update_end(stream)


def test_devices_that_are_not_there_are_refused() -> None:
    assert (npu.is_available(), npu.device_count(), npu.get_device_name(0)) == (True, 1, "Ascend910B3")
    with pytest.raises(RuntimeError, match="Invalid device ID: 1, there are 1 NPUs"):
        npu.set_device(1)
    with pytest.raises(AttributeError, match="has no beep"):
        torch_npu.beep()
