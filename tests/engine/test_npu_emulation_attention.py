"""Emulated attention and caches against torch's own kernel over contiguous keys with an explicit mask."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import npu_calls as calls
from tests.engine.npu_calls import HALF, half, ints
from tests.engine.npu_dense import expected_attention, visible
from tests.support.npu import NotSupportedByNpu, npu_operators

pytestmark = pytest.mark.usefixtures("npu_wheel")


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(
        st.lists(
            st.integers(1, 70).flatmap(lambda keys: st.tuples(st.integers(1, min(keys, 9)), st.just(keys))),
            min_size=1,
            max_size=4,
        )
    )
    return {
        "lengths": lengths,
        "kv_heads": draw(st.sampled_from([1, 2, 3])),
        "groups": draw(st.sampled_from([1, 2, 4])),
        "head_size": draw(st.sampled_from([16, 24, 64])),
        "block_size": draw(st.sampled_from([16, 32, 128])),
        "cache": draw(st.sampled_from(["PWH", "PKWD", "NZ", None])),
        "mode": draw(st.sampled_from([0, 3, 4])),
        "window": draw(st.integers(0, 20)),
    }


@settings(max_examples=60, deadline=None)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_attention_equals_a_dense_one_however_the_keys_are_laid_out(batch: dict[str, Any], seed: int) -> None:
    """TND: paged in three layouts or not at all, no mask, causal and band."""
    kv_heads, size, width = batch["kv_heads"], batch["head_size"], batch["block_size"]
    if batch["cache"] in ("PKWD", "NZ") and size == 24:
        size = 64
    if batch["cache"] == "NZ":
        size = {24: 64}.get(size, size)
    heads = kv_heads * batch["groups"]
    generator = torch.Generator().manual_seed(seed)
    queries = [count for count, _ in batch["lengths"]]
    contexts = [keys for _, keys in batch["lengths"]]
    q = torch.randn(sum(queries), heads, size, generator=generator)
    keys, values = (torch.randn(sum(contexts), kv_heads, size, generator=generator) for _ in range(2))
    call: dict[str, Any] = {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "scale": 0.3,
        "input_layout": "TND",
        "sparse_mode": batch["mode"],
        "actual_seq_lengths": list(accumulate(queries)),
    }
    if batch["mode"]:
        call |= {"atten_mask": calls.triangle(), "pre_tokens": batch["window"], "next_tokens": 0}
    if batch["cache"] is None:
        call |= {"actual_seq_lengths_kv": list(accumulate(contexts)), "key": keys, "value": values}
    else:
        call |= {"actual_seq_lengths_kv": contexts, "block_size": width}
        call |= paged_pool(keys, values, contexts, width, batch["cache"], generator)
    if batch["cache"] == "PKWD" and size not in (64, 128):
        return  # FIA's own kernel: only these sizes in TND
    with npu_operators(also_float32=True):
        if batch["cache"] == "NZ" and call["key"].dtype == torch.float32:
            call = {k: v.half() if k in ("key", "value") else v for k, v in call.items()}
            q, keys, values = q.half(), keys.half(), values.half()
        out, lse = torch.ops.npu.npu_fused_infer_attention_score(query=q, softmax_lse_flag=True, **call)
    tolerance = 2e-3 if out.dtype == HALF else 1e-5
    q_start = kv_start = 0
    for count, context in batch["lengths"]:
        before = {0: context, 3: context, 4: batch["window"]}[batch["mode"]]
        seen = visible(count, context, before=before, after=context if batch["mode"] == 0 else 0)
        rows, columns = slice(q_start, q_start + count), slice(kv_start, kv_start + context)
        expected = expected_attention(q[rows], keys[columns], values[columns], seen, 0.3)
        torch.testing.assert_close(out[rows].double(), expected, atol=tolerance, rtol=tolerance)
        scores = torch.einsum(
            "qnd,lnd->qnl", q[rows].double(), keys[columns].double().repeat_interleave(batch["groups"], 1)
        )
        sums = (scores * 0.3).masked_fill(~seen.unsqueeze(1), float("-inf")).logsumexp(-1, keepdim=True)
        torch.testing.assert_close(lse[rows].double(), sums, atol=tolerance, rtol=tolerance)
        q_start, kv_start = rows.stop, columns.stop


def paged_pool(
    keys: torch.Tensor,
    values: torch.Tensor,
    contexts: list[int],
    width: int,
    layout: str,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """The sequences' keys and values in blocks of a shuffled pool whose other slots hold NaN."""
    counts = [-(-context // width) for context in contexts]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    table = torch.full((len(contexts), max(counts)), -7, dtype=torch.int32)
    pools = [torch.full((sum(counts) + 2, width, *keys.shape[1:]), float("nan")) for _ in range(2)]
    start = 0
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        ids = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(ids, dtype=torch.int32)
        for pool, source in zip(pools, (keys, values), strict=True):
            for place in range(context):
                pool[ids[place // width], place % width] = source[start + place]
        start += context
    match layout:
        case "PWH":
            pools = [pool.flatten(2) for pool in pools]
        case "PKWD":
            pools = [pool.transpose(1, 2).contiguous() for pool in pools]
        case _:
            pools = [pool.view(*pool.shape[:3], -1, 16).permute(0, 2, 3, 1, 4).contiguous() for pool in pools]
    return {"key": pools[0], "value": pools[1], "block_table": table}


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_padded_layouts_equal_a_dense_one(npu: Any, layout: str, mode: int) -> None:
    """Two sequences, the second shorter; what is beyond a length is 0."""
    hidden = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(9)) < 0.3
    hidden[..., 0] = False
    mask = {0: None, 1: hidden, 2: calls.triangle(), 3: calls.triangle()}[mode]
    lengths, contexts = [5, 4], [7, 6]
    call = calls.rows(layout, sparse_mode=mode, atten_mask=mask, softmax_lse_flag=True)
    out, lse = npu.npu_fused_infer_attention_score(**call, actual_seq_lengths=lengths, actual_seq_lengths_kv=contexts)
    plain = calls.rows("BNSD")
    for row, (count, context) in enumerate(zip(lengths, contexts, strict=True)):
        seen = {
            0: torch.ones(count, context, dtype=torch.bool),
            1: ~hidden[row, 0, :count, :context],
            2: torch.ones(count, context, dtype=torch.bool).tril(),
            3: visible(count, context, before=context, after=0),
        }[mode]
        q, k, v = (plain[name][row].transpose(0, 1) for name in ("query", "key", "value"))
        expected = expected_attention(q[:count], k[:context], v[:context], seen, 0.125)
        match layout:
            case "BSH":
                rows = out[row].view(-1, 4, 64)
            case "BNSD":
                rows = out[row].transpose(0, 1)
            case _:
                rows = out[row]
        torch.testing.assert_close(rows[:count].double(), expected, atol=2e-3, rtol=2e-3)
        assert not rows[count:].any()
        assert lse[row, :, count:].isinf().all()


def test_one_query_a_sequence_ignores_sparse_mode_in_padded_layouts(npu: Any) -> None:
    """The decode kernel's way: 'sparse_mode has no effect' for Q_S = 1 (the page, line 224): a mask is a full one."""
    query = half(2, 4, 1, 64)
    plain, _ = npu.npu_fused_infer_attention_score(**calls.rows(query=query))
    assert torch.equal(npu.npu_fused_infer_attention_score(**calls.rows(query=query, sparse_mode=2))[0], plain)
    with pytest.raises(NotSupportedByNpu, match="FIA-MASK-COVERS"):
        npu.npu_fused_infer_attention_score(**calls.rows(query=query, sparse_mode=2, atten_mask=calls.triangle()))
    hidden = torch.tensor([[0, 1, 0, 1, 0, 1, 0]] * 2, dtype=torch.bool)
    masked, _ = npu.npu_fused_infer_attention_score(**calls.rows(query=query, atten_mask=hidden))
    even = calls.rows(query=query) | {name: calls.rows()[name][:, :, ::2].contiguous() for name in ("key", "value")}
    torch.testing.assert_close(masked, npu.npu_fused_infer_attention_score(**even)[0])


def test_blocks_may_be_shared(npu: Any) -> None:
    """Two requests on one prefix: more blocks in the table than in the cache."""
    shared = torch.tensor([[2, 0], [2, 1]], dtype=torch.int32)
    call = calls.paged(key=half(3, 128, 32, seed=1), value=half(3, 128, 32, seed=2), block_table=shared)
    call |= {"query": half(2, 4, 16), "actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": [130, 140]}
    out, _ = npu.npu_fused_infer_attention_score(**call)
    assert out.isfinite().all()


def test_two_calls_merged_by_their_sums_are_one(float32_npu: Any) -> None:
    """A shared prefix of 40 keys without a mask, the own keys causally; a third part has no keys at all."""
    q = torch.randn(6, 4, 16)
    keys, values = torch.randn(2, 50, 2, 16).unbind()
    common: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.25, "input_layout": "TND"}

    def part(columns: slice, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = float32_npu.npu_fused_infer_attention_score(
            q,
            keys[columns],
            values[columns],
            actual_seq_lengths=[6],
            actual_seq_lengths_kv=[columns.stop - columns.start],
            softmax_lse_flag=True,
            **common,
            **changes,
        )
        return out.reshape(-1, 16), lse.reshape(-1)

    causal: dict[str, Any] = {"sparse_mode": 3, "atten_mask": calls.triangle()}
    parts = [part(slice(0, 40)), part(slice(40, 50), **causal), part(slice(0, 0))]
    assert not parts[2][0].any()
    assert (parts[2][1] == float("inf")).all()
    merged, sums = float32_npu.npu_attention_update([lse for _, lse in parts], [out for out, _ in parts], 1)
    whole, lse = part(slice(0, 50), **causal)
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums, lse, atol=1e-5, rtol=1e-5)
    _, undefined = float32_npu.npu_attention_update([parts[0][1]], [parts[0][0]], 0)
    assert undefined.isnan().all()


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
def test_tokens_go_to_their_slots_and_come_back(npu: Any, mode: str) -> None:
    call = (
        calls.scatter(slot_mapping=ints(5, -1, 511))
        if mode == "Norm"
        else calls.scatter_nz(slot_mapping=ints(5, -1, 511))
    )
    npu.npu_scatter_pa_kv_cache(**call)
    cache = call["key_cache"]
    if mode == "PA_NZ":
        cache = cache.transpose(1, 2).reshape(4, 128, 2, 16)
    expected = torch.zeros(512, 2, 16, dtype=HALF)
    expected[5], expected[511] = call["key"][0], call["key"][2]
    assert torch.equal(cache.flatten(0, 1), expected)

    marked = {
        name: npu.npu_format_cast(call[name], 29 if mode == "PA_NZ" else 2) for name in ("key_cache", "value_cache")
    }
    back = torch.zeros(6, 2, 16, dtype=HALF)
    back = back.flatten(1) if mode == "PA_NZ" else back
    npu.npu_gather_pa_kv_cache(
        *marked.values(), torch.zeros(1, 1, dtype=torch.int32), ints(6), back, torch.zeros_like(back)
    )
    assert torch.equal(back.view(6, 2, 16)[5], call["key"][0])


@pytest.mark.parametrize("cumulative", [False, True])
def test_gathered_sequences_stand_one_after_another(npu: Any, cumulative: bool) -> None:
    call = calls.gather(seq_offset=ints(128, 0), block_tables=torch.tensor([[9, 2, 0], [1, 3, 9]], dtype=torch.int32))
    call |= {"seq_lens": ints(0, 130, 137), "is_seq_lens_cumsum": True} if cumulative else {}
    npu.npu_gather_pa_kv_cache(**call)
    for name in ("key", "value"):
        cache = call[f"{name}_cache"]
        assert torch.equal(call[name], torch.cat([cache[2], cache[0, :2], cache[1, :7]]))


def test_formats_belong_to_storages(npu: Any) -> None:
    made = npu.empty_with_format([4, 2, 16], dtype=HALF, acl_format=29)
    assert (made.shape, made.dtype) == (torch.Size((4, 2, 16)), HALF)
    cast = npu.npu_format_cast(made, 2)
    assert [npu.get_npu_format(tensor) for tensor in (made, made[1], cast, half(2))] == [29, 29, 2, 2]
