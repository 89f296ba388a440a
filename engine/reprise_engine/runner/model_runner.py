"""Runs a Step: stores, loads, copies, forward pass, log-probabilities of the prompt, sampling. Knows nothing of
requests beyond the step it is given."""

from __future__ import annotations

import math
from time import perf_counter

import torch
from torch import nn

from reprise_engine.attention.base import AttentionBackend, AttentionMetadata, LayerKV
from reprise_engine.attention.bridge import PagedContext
from reprise_engine.errors import NotFinite, RepriseError
from reprise_engine.models.loader import LoadedModel
from reprise_engine.request import RequestId, TokenLogprobs
from reprise_engine.runner.batch import Batch, build_batch
from reprise_engine.runner.npu_graphs import DecodeGraphs, GraphCapturer, capture_decode_graphs, spare_blocks
from reprise_engine.runner.transfer import KVTransfer
from reprise_engine.sampler import mask_logits, sample
from reprise_engine.step import Step, StepResult
from reprise_engine.structured.masks import Grammars
from reprise_engine.token_logprobs import token_logprobs

SCORED_ROWS = 32
"""Rows of logits that are there at once for the log-probabilities of a prompt."""


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
        grammars: Grammars | None = None,
        num_spare_blocks: int = 0,
    ) -> None:
        """The last `num_spare_blocks` of `kv` are nobody's: padded rows of captured graphs are written there."""
        self._model = model
        self._backend = backend
        self._kv = kv
        self._seed = seed
        self._transfer = transfer
        self._grammars = grammars
        # transformers leaves both untyped.
        self._decoder: nn.Module = model.module.get_decoder()  # type: ignore[no-untyped-call]
        self._head: nn.Module = model.module.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._block_size = kv[0].block_size
        self._num_blocks = kv[0].num_blocks - num_spare_blocks
        self._graphs: DecodeGraphs | None = None

    def capture_decode_graphs(
        self, capturer: GraphCapturer, sizes: tuple[int, ...], *, max_model_len: int
    ) -> DecodeGraphs | None:
        """Decode steps of up to `max(sizes)` requests are replayed from now on. None where no graph could be captured:
        then they go on being run eagerly. Needs `spare_blocks(sizes, …)` of them."""
        needed = spare_blocks(sizes, block_size=self._block_size)
        assert self._kv[0].num_blocks - self._num_blocks >= needed, "padded rows have no slots of their own"
        self._graphs = capture_decode_graphs(
            self._decode,
            capturer,
            sizes,
            max_model_len=max_model_len,
            block_size=self._block_size,
            first_spare=self._num_blocks,
            device=self._model.device,
        )
        return self._graphs

    def run(self, step: Step) -> StepResult:
        """One forward pass over the step's tokens. Raises ValueError for a step that does not fit its blocks."""
        if not step.requests:
            seconds = self._transfer_blocks(step)
            self._copy_blocks(step)
            return StepResult(step_id=step.step_id, sampled={}, transfer_seconds=seconds)
        batch = build_batch(step, block_size=self._block_size, num_blocks=self._num_blocks, device=self._model.device)
        pending = None if self._grammars is None else self._grammars.masks(batch.sampling)
        transfer_seconds = self._transfer_blocks(step)
        with torch.inference_mode():
            self._copy_blocks(step)
            hidden_TD = self._forward(batch)
            prompt_logprobs = self._score_prompts(hidden_TD, step)
            errors = _errors({name for name, scores in prompt_logprobs.items() if not _are_numbers(scores)})
            if not batch.sampling:
                return StepResult(
                    step_id=step.step_id,
                    sampled={},
                    prompt_logprobs=prompt_logprobs,
                    errors=errors,
                    transfer_seconds=transfer_seconds,
                )
            logits_RV = self._logits(hidden_TD[batch.logits_rows])
            # Before masks, which are infinite. A sum is not finite where one of its parts is not, in every arithmetic,
            # where a maximum may pass over NaN; and finite logits of 16 bits do not add up to what float32 holds.
            totals_R = logits_RV.sum(dim=-1)
            masks = None if pending is None else pending.result()
            if masks is not None:
                mask_logits(logits_RV, masks.rows, masks.words_MW)
            choices = sample(logits_RV, batch.sampling, engine_seed=self._seed)
            finite = [math.isfinite(total) for total in totals_R.tolist()]
        errors |= _errors(
            {request.request_id for request, good in zip(batch.sampling, finite, strict=True) if not good}
        )
        chosen = {request.request_id: choice for request, choice in zip(batch.sampling, choices, strict=True)}
        return StepResult(
            step_id=step.step_id,
            sampled={request_id: choice.token_id for request_id, choice in chosen.items()},
            logprobs={
                request_id: choice.logprobs for request_id, choice in chosen.items() if choice.logprobs is not None
            },
            prompt_logprobs=prompt_logprobs,
            errors=errors if masks is None else {**masks.errors, **errors},
            transfer_seconds=transfer_seconds,
        )

    def logits(self, step: Step, *, every_token: bool = False) -> torch.Tensor:
        """The float32 logits (R, V) of the requests that sample, instead of their tokens. Writes KV like `run`.

        With `every_token` those of all tokens of the step, (T, V), in its order.
        """
        batch = build_batch(step, block_size=self._block_size, num_blocks=self._num_blocks, device=self._model.device)
        self._transfer_blocks(step)
        with torch.inference_mode():
            self._copy_blocks(step)
            hidden_TD = self._forward(batch)
            return self._logits(hidden_TD if every_token else hidden_TD[batch.logits_rows])

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
        """The last hidden states (T, D) of the tokens of the step: a decode step is replayed where it was captured."""
        replayed = None if self._graphs is None else self._graphs.run(batch)
        if replayed is not None:
            return replayed
        return self._decode(batch.input_ids_1T, batch.position_ids_1T, batch.metadata)

    def _decode(
        self, input_ids_1T: torch.Tensor, position_ids_1T: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        output = self._decoder(
            input_ids=input_ids_1T,
            position_ids=position_ids_1T,
            use_cache=False,
            paged=PagedContext(backend=self._backend, kv=self._kv, metadata=metadata),
        )
        hidden_1TD: torch.Tensor = output.last_hidden_state
        return hidden_1TD[0, : input_ids_1T.shape[1]]  # without rows that some layers pad with

    def _logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        logits_RV: torch.Tensor = self._head(hidden_RD)
        return logits_RV.float()

    def _score_prompts(self, hidden_TD: torch.Tensor, step: Step) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
        """Log-probabilities of the tokens to be scored, with a few rows of logits at a time."""
        found: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
        first = 0
        for request in step.requests:
            row = first + request.scored_from
            first += len(request.token_ids)
            if not request.scored:
                continue
            scores: list[TokenLogprobs] = []
            for start in range(0, len(request.scored), SCORED_ROWS):
                tokens = request.scored[start : start + SCORED_ROWS]
                scores += token_logprobs(
                    self._logits(hidden_TD[row + start : row + start + len(tokens)]),  # held by nobody afterwards
                    tokens,
                    num_top=request.sampling.prompt_logprobs or 0,
                )
            found[request.request_id] = tuple(scores)
        return found


def _are_numbers(scores: tuple[TokenLogprobs, ...]) -> bool:
    return not any(math.isnan(score.logprob) for score in scores)


def _errors(requests: set[RequestId]) -> dict[RequestId, RepriseError]:
    return {
        request_id: NotFinite(
            "The model computed no finite numbers for this request, so there is nothing to choose a token from. With "
            "float16 some models exceed its 65,504: serve it in bfloat16 (--dtype) where the device has it, or "
            "another model. Where other prompts fail too, check weights and device."
        )
        for request_id in requests
    }
