"""Puts the prefix cache's tiers together: how large they are, whose KV they may exchange, what they consist of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from reprise_engine.attention.base import KVLayout, LayerKV
from reprise_engine.attention.npu_chip import chip_of
from reprise_engine.config import CacheConfig
from reprise_engine.errors import ConfigError
from reprise_engine.kv.tiering import Tiering
from reprise_engine.models.loader import LoadedModel
from reprise_engine.native import Kernels
from reprise_engine.native.build import library_path
from reprise_engine.parallel.slots import SharedSlots
from reprise_engine.runner.transfer import KVTransfer, create_transfer
from reprise_engine.tiers.disk import DiskStore
from reprise_engine.tiers.fingerprint import content_files, fingerprint_files
from reprise_engine.tiers.folder import PrivateFolder
from reprise_engine.tiers.host import HostSlots
from reprise_engine.tiers.identity import CacheIdentity, canonical_config
from reprise_engine.tiers.worker import DiskWorker

logger = logging.getLogger(__name__)

STAGING_BYTES = 64 * 2**20
"""Host memory through which blocks pass to the disk and back, where there is no host tier."""
_FEWEST_SLOTS = 4
"""Fewer would leave the disk nothing to do beside what is being copied."""
LAYOUTS = {KVLayout.BSKH: "layer,kv,slot,head,dim", KVLayout.NZ: "layer,kv,column,slot,16"}
"""Of a slot: see runner/transfer.py."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """`transfer` is the runner's part, `tiering` the scheduler's."""

    transfer: KVTransfer
    tiering: Tiering


def check_folder(cache: CacheConfig) -> None:
    """Before minutes are spent on weights. Raises ConfigError where --prefix-cache-dir cannot be used."""
    if cache.prefix_cache_dir is not None:
        PrivateFolder(cache.prefix_cache_dir)


def num_host_slots(cache: CacheConfig, *, bytes_per_block: int) -> int:
    """Blocks that fit the host memory of the tiers; 0 where they are off. Raises ConfigError for less than one."""
    given = cache.prefix_cache_host_memory
    if given and given < bytes_per_block:
        raise ConfigError(
            f"--prefix-cache-host-memory is {given} bytes, but the KV of one block takes {bytes_per_block} bytes. "
            "Raise it, or leave it out."
        )
    if cache.prefix_cache_dir is None:
        return given // bytes_per_block
    return max((given or STAGING_BYTES) // bytes_per_block, _FEWEST_SLOTS)


def build_tiers(
    cache: CacheConfig,
    model: LoadedModel,
    kv: Sequence[LayerKV],
    *,
    block_size: int,
    bytes_per_block: int,
    kernels: Kernels | None,
    shared: SharedSlots | None = None,
    num_ranks: int = 1,
) -> Tiers | None:
    """None where no tier is asked for. Raises ConfigError for a folder or a size that cannot be used.

    `shared` are the slots of `num_ranks` ranks, `bytes_per_block` then what a block takes on all of them.
    """
    num_slots = num_host_slots(cache, bytes_per_block=bytes_per_block)
    if not num_slots:
        return None
    store = None
    if cache.prefix_cache_dir is not None:
        store = DiskStore(
            cache.prefix_cache_dir,
            capacity_bytes=cache.disk_size,
            identity=_identity(
                cache, model, layout=kv[0].layout, block_size=block_size, kernels=kernels, num_ranks=num_ranks
            ),
            payload_bytes=bytes_per_block,
        )
        logger.info("%s holds %d blocks of the prefix cache", cache.prefix_cache_dir, store.stats().records)
    transfer = create_transfer(kv, num_slots=num_slots, slots_QX=None if shared is None else shared.part(0))
    if store is not None and (records := store.stats().records):
        staging = max(1, STAGING_BYTES // bytes_per_block)
        transfer.expect(num_blocks=min(records, kv[0].num_blocks), num_slots=min(staging, num_slots))
    tiering = Tiering(
        HostSlots(num_slots),
        None if store is None else DiskWorker(store, transfer.view if shared is None else shared.view),
        keeps_evicted=cache.prefix_cache_host_memory > 0,
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        names_are_keys=cache.prefix_caching_hash_algo == "sha256",
    )
    return Tiers(transfer, tiering)


def _identity(
    cache: CacheConfig,
    model: LoadedModel,
    *,
    layout: KVLayout,
    block_size: int,
    kernels: Kernels | None,
    num_ranks: int,
) -> CacheIdentity:
    files, spec = model.files, model.spec
    if model.device.type == "cpu":
        # The library's name carries the digest of its sources: other kernels round otherwise.
        arithmetic = "cpu-torch" if kernels is None else f"cpu-{kernels.level}-{library_path().stem}"
    else:
        arithmetic = f"npu-{chip_of(model.device).name}"
    if model.quantization is not None:
        arithmetic += "-w8a8"
    if num_ranks > 1:
        # Sums over the ranks round otherwise than one rank's; and a payload has the parts of all, rank after rank.
        arithmetic += f"-tp{num_ranks}"
    return CacheIdentity(
        weights=fingerprint_files(
            content_files(files.folder, weights=files.weights, gguf_file=files.gguf_file),
            cache_folder=cache.prefix_cache_dir,
        ),
        config=canonical_config(spec.config.to_dict()),
        dtype=model.dtype,
        kv_dtype=str(model.kv_dtype).removeprefix("torch."),
        arithmetic=arithmetic,
        layout=LAYOUTS[layout],
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
    )
