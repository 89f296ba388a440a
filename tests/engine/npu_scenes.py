"""Steps for the NPU backends, and what they must come to: the reference backend, in float32, on the same rounded KV."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from reprise_engine.attention.base import AttentionBackend, AttentionMetadata, KVLayout, LayerKV, SharedPrefix
from reprise_engine.attention.reference import ReferenceAttention
from reprise_engine.runner.kv_cache import allocate_kv_cache

SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """(query_len, kv_len) of every request of one step, and which of them share how many whole blocks."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    shared: tuple[tuple[tuple[int, ...], int], ...] = ()
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    block_size: int = 128
    sliding_window: int | None = None


@dataclass
class Scene:
    """A step's inputs over a pool that already holds the KV of earlier steps."""

    case: Case
    q_TNH: torch.Tensor
    k_TKH: torch.Tensor
    v_TKH: torch.Tensor
    kv: LayerKV
    metadata: AttentionMetadata

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        return backend.forward(
            self.q_TNH,
            self.k_TKH,
            self.v_TKH,
            self.kv,
            self.metadata,
            scale=SCALE,
            sliding_window=self.case.sliding_window,
        )

    def reference(self) -> tuple[torch.Tensor, LayerKV]:
        """The output in float32, and the pool as it must be after the step. This scene stays as it is."""
        wide = replace(
            self,
            q_TNH=self.q_TNH.float(),
            k_TKH=self.k_TKH.float(),
            v_TKH=self.v_TKH.float(),
            kv=LayerKV(as_bskh(self.kv.key_BSKH, self).float(), as_bskh(self.kv.value_BSKH, self).float()),
            metadata=replace(self.metadata, shared_prefixes=()),
        )
        return wide.run(ReferenceAttention()), wide.kv


def make_scene(case: Case, *, dtype: torch.dtype = torch.float16, layout: KVLayout = KVLayout.BSKH) -> Scene:
    generator = torch.Generator().manual_seed(5)
    (num_heads, num_kv_heads), size = case.heads, case.block_size
    needed = [-(-kv_len // size) for _, kv_len in case.lengths]
    num_blocks = sum(needed) + 2
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    for requests, blocks in case.shared:
        for request in requests[1:]:
            tables[request][:blocks] = tables[requests[0]][:blocks]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    # Garbage, not zeros, in every slot that is not written: reading one shows.
    pool = torch.full((2, num_blocks, size, num_kv_heads, case.head_dim), 50.0, dtype=dtype)
    slots: list[torch.Tensor] = []
    for (query_len, kv_len), table in zip(case.lengths, tables, strict=True):
        slot = torch.tensor([table[p // size] * size + p % size for p in range(kv_len)])
        old = slot[: kv_len - query_len]
        pool.flatten(1, 2)[:, old] = randn(2, len(old), num_kv_heads, case.head_dim)
        slots.append(slot[len(old) :])
    num_rows = sum(query_len for query_len, _ in case.lengths)
    width = max(needed)
    scene = Scene(
        case,
        randn(num_rows, num_heads, case.head_dim),
        randn(num_rows, num_kv_heads, case.head_dim),
        randn(num_rows, num_kv_heads, case.head_dim),
        LayerKV(pool[0], pool[1]),
        AttentionMetadata(
            slot_mapping_T=torch.cat(slots),
            block_table_RM=torch.tensor([[*t, *[0] * (width - len(t))] for t in tables], dtype=torch.int32),
            query_lens=tuple(query_len for query_len, _ in case.lengths),
            kv_lens=tuple(kv_len for _, kv_len in case.lengths),
            block_size=size,
            shared_prefixes=tuple(SharedPrefix(requests, blocks * size) for requests, blocks in case.shared),
        ),
    )
    return scene if layout is KVLayout.BSKH else replace(scene, kv=_as_nz(scene))


def as_bskh(pool: torch.Tensor, scene: Scene) -> torch.Tensor:
    """A pool of the scene's layout as (B, S, K, H), in memory of its own."""
    if scene.kv.layout is KVLayout.NZ:
        pool = pool.transpose(1, 2)
    return pool.reshape(len(pool), scene.case.block_size, -1, scene.case.head_dim).clone()


def _as_nz(scene: Scene) -> LayerKV:
    [kv] = allocate_kv_cache(
        num_layers=1,
        num_blocks=scene.kv.num_blocks,
        block_size=scene.case.block_size,
        num_kv_heads=scene.case.heads[1],
        head_dim=scene.case.head_dim,
        dtype=scene.q_TNH.dtype,
        device=torch.device("cpu"),
        layout=KVLayout.NZ,
    )
    for target, pool in ((kv.key_BSKH, scene.kv.key_BSKH), (kv.value_BSKH, scene.kv.value_BSKH)):
        target.copy_(pool.reshape(*pool.shape[:2], -1, 16).transpose(1, 2))
    return kv
