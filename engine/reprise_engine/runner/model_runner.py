"""Runs a Step: stores, loads, copies, forward pass, sampling. Knows nothing of requests beyond the step it is given."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import torch

from reprise_engine.attention.base import AttentionBackend, LayerKV
from reprise_engine.attention.bridge import PagedContext
from reprise_engine.models.loader import LoadedModel
from reprise_engine.runner.batch import Batch, build_batch
from reprise_engine.runner.transfer import KVTransfer
from reprise_engine.sampler import sample
from reprise_engine.step import Step, StepResult


class ModelRunner:
    """Owns the KV tensors; which block belongs to whom is the scheduler's business."""

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        kv: tuple[LayerKV, ...],
        *,
        seed: int,
        transfer: KVTransfer | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._kv = kv
        self._seed = seed
        self._transfer = transfer
        self._num_blocks, self._block_size = kv[0].key_BSKH.shape[:2]

    def run(self, step: Step) -> StepResult:
        """One forward pass over the step's tokens. Raises ValueError for a step that does not fit its blocks."""
        if not step.requests:
            seconds = self._transfer_blocks(step)
            self._copy_blocks(step)
            return StepResult(step_id=step.step_id, sampled={}, transfer_seconds=seconds)
        batch = build_batch(step, block_size=self._block_size, num_blocks=self._num_blocks, device=self._model.device)
        transfer_seconds = self._transfer_blocks(step)
        with torch.inference_mode():
            self._copy_blocks(step)
            logits_RV = self._forward(batch)
            if not batch.sampling:
                return StepResult(step_id=step.step_id, sampled={}, transfer_seconds=transfer_seconds)
            choices = sample(logits_RV, batch.sampling, engine_seed=self._seed)
        request_ids = [request.request_id for request in batch.sampling]
        return StepResult(
            step_id=step.step_id,
            sampled={request_id: choice.token_id for request_id, choice in zip(request_ids, choices, strict=True)},
            logprobs={
                request_id: choice.logprobs
                for request_id, choice in zip(request_ids, choices, strict=True)
                if choice.logprobs is not None
            },
            transfer_seconds=transfer_seconds,
        )

    def logits(self, step: Step, *, every_token: bool = False) -> torch.Tensor:
        """The float32 logits (R, V) of the requests that sample, instead of their tokens. Writes KV like `run`.

        With `every_token` those of all tokens of the step, (T, V), in its order.
        """
        batch = build_batch(step, block_size=self._block_size, num_blocks=self._num_blocks, device=self._model.device)
        self._transfer_blocks(step)
        if every_token:
            batch = replace(batch, logits_rows=torch.arange(step.num_tokens, device=self._model.device))
        with torch.inference_mode():
            self._copy_blocks(step)
            return self._forward(batch)

    def _transfer_blocks(self, step: Step) -> float:
        """Returns the seconds that it took."""
        if not step.stores and not step.loads:
            return 0.0
        if self._transfer is None:
            raise ValueError(f"step {step.step_id} moves blocks to or from host memory, but there is none")
        begun = perf_counter()
        for block in (*(store.source for store in step.stores), *(load.target for load in step.loads)):
            if not 0 <= block < self._num_blocks:
                raise ValueError(
                    f"block {block} of step {step.step_id} is outside the pool of {self._num_blocks} blocks"
                )
        self._transfer.store(step.stores)
        self._transfer.load(step.loads)
        return perf_counter() - begun

    def _copy_blocks(self, step: Step) -> None:
        if not step.copies:
            return
        copies = tuple((int(copy.source), int(copy.target)) for copy in step.copies)
        for source, target in copies:
            if not (0 <= source < self._num_blocks and 0 <= target < self._num_blocks):
                raise ValueError(f"copy of block {source} to {target} is outside the pool of {self._num_blocks} blocks")
        for layer in self._kv:
            self._backend.copy_blocks(layer, copies)

    def _forward(self, batch: Batch) -> torch.Tensor:
        output = self._model.module(
            input_ids=batch.input_ids_1T,
            position_ids=batch.position_ids_1T,
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            paged=PagedContext(backend=self._backend, kv=self._kv, metadata=batch.metadata),
        )
        logits_1RV: torch.Tensor = output.logits
        return logits_1RV[0].float()
