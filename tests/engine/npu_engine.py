"""The engine core on the NPU backends and the emulated operators, and the judge of what it generates.

The judge is plain transformers layers on the reference backend in float32, on the same rounded weights: at every
position it computes the logits that follow prompt and output so far, and the engine's token must be the best one. In
float32, which only the emulation has, to the bit; else up to what rounding to 16 bits can do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch

from reprise_engine.attention.base import AttentionBackend
from reprise_engine.attention.npu import NPUAttention
from reprise_engine.attention.npu_310p import NPU310PAttention
from reprise_engine.attention.npu_chip import Chip
from reprise_engine.attention.reference import ReferenceAttention
from reprise_engine.config import ModelConfig, SchedulerConfig
from reprise_engine.kv.tiering import Tiering
from reprise_engine.loop import EngineCore
from reprise_engine.models.loader import LoadedModel, load_model
from reprise_engine.models.npu_layers import fuse_npu_layers
from reprise_engine.request import EngineRequest, RequestId, RequestOutput, SamplingParams
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.runner.transfer import DeviceTransfer
from reprise_engine.scheduler import Scheduler
from reprise_engine.step import BlockId, ScheduledRequest, Step, StepResult
from reprise_engine.tiers.host import HostSlots
from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE, tiny_model_path

CPU = torch.device("cpu")
BLOCK = 128
TOLERANCE = {torch.float32: 0.0, torch.float16: 0.05}
"""How far below the best logit a token may be, in standard deviations of the logits."""


@cache
def _loaded(family: str) -> LoadedModel:
    return load_model(ModelConfig(model=str(tiny_model_path(family)), dtype="float32"), device=CPU)


def load(family: str, dtype: torch.dtype) -> LoadedModel:
    """A tiny model of its own, with weights and activations of `dtype`, its layers as transformers has them."""
    model = _loaded(family)
    module = cast(Any, copy.deepcopy(model.module)).to(dtype)
    return replace(model, module=module, dtype=str(dtype).removeprefix("torch."), kv_dtype=dtype)


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())


@dataclass
class Engine:
    """A core with one request after the other, or several at once. `steps` are those that it ran."""

    core: EngineCore
    steps: list[Step]

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 5) -> list[tuple[tuple[int, ...], int]]:
        """(output, cached tokens) of each prompt, all of them at once."""
        names = [RequestId(f"request-{index}") for index in range(len(prompts))]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        refused = self.core.submit(
            EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, arrival_time=0.0)
            for name, prompt in zip(names, prompts, strict=True)
        )
        assert not refused
        outputs: dict[RequestId, list[RequestOutput]] = {name: [] for name in names}
        while self.core.has_work():
            for output in self.core.step():
                assert output.error is None
                outputs[output.request_id].append(output)
        return [
            (
                tuple(token for output in outputs[name] for token in output.new_token_ids),
                outputs[name][-1].cached_tokens,
            )
            for name in names
        ]


class _Recording:
    def __init__(self, runner: ModelRunner, steps: list[Step]) -> None:
        self._runner, self._steps = runner, steps

    def run(self, step: Step) -> StepResult:
        self._steps.append(step)
        return self._runner.run(step)


def make_engine(
    family: str,
    chip: Chip,
    *,
    dtype: torch.dtype,
    num_blocks: int = 16,
    max_num_batched_tokens: int = 512,
    caching: bool = True,
    host_slots: int = 0,
    backend: AttentionBackend | None = None,
) -> Engine:
    """What core.py puts together for an NPU, on CPU tensors."""
    model = load(family, dtype)
    fuse_npu_layers(model.module, chip=chip)
    if backend is None:
        backend = NPU310PAttention(CPU) if chip is Chip.P310 else NPUAttention(CPU)
    kv = allocate_kv_cache(
        num_layers=model.spec.num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=model.kv_dtype,
        device=CPU,
        layout=chip.kv_layout,
    )
    tiering = None
    if host_slots:
        bytes_per_block = BLOCK * model.spec.kv_bytes_per_token(bytes_per_element=dtype.itemsize)
        tiering = Tiering(
            HostSlots(host_slots),
            None,
            keeps_evicted=True,
            block_size=BLOCK,
            bytes_per_block=bytes_per_block,
            names_are_keys=True,
        )
    runner = ModelRunner(
        model,
        backend,
        kv,
        seed=0,
        transfer=DeviceTransfer(kv, num_slots=host_slots, pinned=False) if host_slots else None,
    )
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens),
        num_blocks=num_blocks,
        block_size=BLOCK,
        enable_prefix_caching=caching,
        max_model_len=num_blocks * BLOCK,
        tiering=tiering,
    )
    steps: list[Step] = []
    return Engine(EngineCore(scheduler, _Recording(runner, steps)), steps)


class Judge:
    """Knows what a model says of any sequence."""

    def __init__(self, family: str, dtype: torch.dtype) -> None:
        rounded = load(family, dtype)
        cast(Any, rounded.module).float()
        self._model = replace(rounded, kv_dtype=torch.float32)
        self._tolerance = TOLERANCE[dtype]

    def check(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Fails where a token of `output` is not what the model says after what precedes it."""
        assert output
        logits_TV = self._logits((*prompt, *output[:-1]))[len(prompt) - 1 :]
        best = logits_TV.max(dim=-1).values
        chosen = logits_TV.gather(1, torch.tensor(output).unsqueeze(1))[:, 0]
        short = (best - chosen) / logits_TV.std()
        assert short.max() <= self._tolerance, f"{tuple(output)} falls short of the best logits by {short.tolist()}"

    def check_all(self, prompts: Iterable[Sequence[int]], answers: Iterable[tuple[tuple[int, ...], int]]) -> None:
        for prompt, (output, _) in zip(prompts, answers, strict=True):
            self.check(prompt, output)

    def _logits(self, sequence: Sequence[int]) -> torch.Tensor:
        spec = self._model.spec
        num_blocks = -(-len(sequence) // BLOCK)
        assert len(sequence) <= MAX_POSITIONS
        kv = allocate_kv_cache(
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            block_size=BLOCK,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=torch.float32,
            device=CPU,
        )
        request = ScheduledRequest(
            request_id=RequestId("judged"),
            token_ids=tuple(sequence),
            start=0,
            block_table=tuple(BlockId(block) for block in range(num_blocks)),
            samples=False,
            sampling=SamplingParams(temperature=0.0),
        )
        runner = ModelRunner(self._model, ReferenceAttention(), kv, seed=0)
        return runner.logits(Step(step_id=1, requests=(request,)), every_token=True)
