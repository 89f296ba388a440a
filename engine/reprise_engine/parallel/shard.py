"""Which part of which weight a rank holds: arithmetic on names and sizes, pure.

As in Megatron-LM (Shoeybi et al. 2019): queries, keys, values, gate and up are cut by their outputs, o_proj and
down_proj by their inputs, so what a rank computes between the two needs nobody, and one sum over the ranks ends each
half of a layer. Experts of a mixture are cut like an MLP, each by its intermediate size. Embedding, norms, router are
whole on every rank. Where there are fewer key/value heads than ranks, several ranks hold the same one.

Of a quantised layer (models/w8a8.py) what there is for each output goes with its outputs: weight_scale, weight_offset,
deq_scale, quant_bias. input_scale and input_offset are the layer's, so they are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reprise_engine.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from reprise_engine.models.spec import ModelSpec

FLAG = "--tensor-parallel-size"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Definitions whose weights have the names below."""
CUT_BY_INPUTS = ("o_proj", "down_proj")
"""Linear layers whose outputs on the ranks are parts of a sum."""
_OF_THE_LAYER = ("input_scale", "input_offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of `size`."""

    rank: int
    size: int

    def part(self, total: int) -> tuple[int, int]:
        """This rank's half-open interval of `total`, which `size` divides."""
        each = total // self.size
        return self.rank * each, (self.rank + 1) * each


@dataclass(frozen=True, slots=True)
class Cut:
    """The parts of a tensor to keep: half-open intervals along one axis, put together in their order."""

    axis: int
    intervals: tuple[tuple[int, int], ...]


def check_size(spec: ModelSpec, size: int) -> None:
    """Raises ConfigError for a number of ranks that does not divide the model, UnsupportedModel for a model that is not
    served by several."""
    if size == 1:
        return
    if spec.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{FLAG} is {size}, but {spec.architecture} is served by one rank only. Set it to 1. Several serve "
            f"{', '.join(ARCHITECTURES)}."
        )
    fault = _fault(spec, size)
    if fault is not None:
        fitting = [str(fits) for fits in range(1, spec.num_heads + 1) if _fault(spec, fits) is None]
        raise ConfigError(f"{FLAG} is {size}, but {fault}. Use one of {', '.join(fitting)}.")


def _fault(spec: ModelSpec, size: int) -> str | None:
    """Why `size` ranks cannot share the model."""
    if spec.num_heads % size:
        return f"the model has {spec.num_heads} attention heads, which {size} does not divide"
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        return f"the model has {spec.num_kv_heads} key/value heads: neither number divides the other"
    if spec.expert_size % size:
        return f"the model's experts have an intermediate size of {spec.expert_size}, which {size} does not divide"
    if _has_dense_mlp(spec) and spec.intermediate_size % size:
        return f"the model has an intermediate size of {spec.intermediate_size}, which {size} does not divide"
    return None


def _has_dense_mlp(spec: ModelSpec) -> bool:
    """Whether some layer has an MLP that is no mixture."""
    config = spec.config
    return (
        not spec.expert_size
        or bool(getattr(config, "mlp_only_layers", None))
        or getattr(config, "decoder_sparse_step", 1) > 1
    )


def kv_heads(num_kv_heads: int, place: Place) -> tuple[int, int]:
    """The half-open interval of key/value heads that the rank's query heads read."""
    if num_kv_heads >= place.size:
        return place.part(num_kv_heads)
    head = place.rank * num_kv_heads // place.size
    return head, head + 1


def rank_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """The model as each of `size` ranks sees it: its own heads and its share of each MLP. `spec` stays as it is."""
    config = deepcopy(spec.config)
    heads, kv = spec.num_heads // size, max(1, spec.num_kv_heads // size)
    config.head_dim = spec.head_dim  # definitions would divide the hidden size by the heads that are left
    config.num_attention_heads, config.num_key_value_heads = heads, kv
    inner, expert = spec.intermediate_size, spec.expert_size
    if _has_dense_mlp(spec):
        inner //= size
        config.intermediate_size = inner
    if expert:
        expert //= size
        config.moe_intermediate_size = expert
    return replace(spec, num_heads=heads, num_kv_heads=kv, intermediate_size=inner, expert_size=expert, config=config)


def cut_of(name: str, shape: Sequence[int], spec: ModelSpec, place: Place) -> Cut | None:
    """What a rank keeps of the weight `name` of this `shape`; None for all of it. `spec` is the whole model's.

    Names are those of checkpoints (one matrix an expert) and of the definitions (one tensor for all experts).
    """
    module, kind = _module_and_kind(name)
    if kind in _OF_THE_LAYER:
        return None
    match module:
        case "q_proj":
            return _heads(0, place.part(spec.num_heads), spec.head_dim)
        case "k_proj" | "v_proj":
            return _heads(0, kv_heads(spec.num_kv_heads, place), spec.head_dim)
        case "o_proj" if kind == "weight":
            return _heads(1, place.part(spec.num_heads), spec.head_dim)
        case "gate_proj" | "up_proj":
            return Cut(0, (place.part(shape[0]),))
        case "gate_up_proj":
            half = shape[1] // 2
            first, last = place.part(half)
            return Cut(1, ((first, last), (half + first, half + last)))
        case "down_proj" if kind == "weight":
            return Cut(len(shape) - 1, (place.part(shape[-1]),))
        case _:
            return None


def is_zero(name: str, place: Place) -> bool:
    """Whether the rank has zeros in the place of the weight: what is added after a sum over the ranks is added once, by
    the first of them."""
    module, kind = _module_and_kind(name)
    return place.rank > 0 and kind == "bias" and module in CUT_BY_INPUTS


def _module_and_kind(name: str) -> tuple[str, str]:
    """ "model.layers.0.self_attn.q_proj.bias" → ("q_proj", "bias"). A tensor of all experts is a parameter itself."""
    parts = name.split(".")
    if parts[-1] in ("gate_up_proj", "down_proj"):
        return parts[-1], "weight"
    return (parts[-2] if len(parts) > 1 else ""), parts[-1]


def _heads(axis: int, heads: tuple[int, int], head_dim: int) -> Cut:
    first, last = heads
    return Cut(axis, ((first * head_dim, last * head_dim),))
