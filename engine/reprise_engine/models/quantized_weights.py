"""A quantised checkpoint → the `transformers` definition with our layers in it.

transformers knows neither the files' names nor their tensors, so: the definition is made without memory (on torch's
meta device), the quantised layers are put in, and each tensor of the files goes to the parameter of its name. A tensor
that nothing takes, and a parameter that nothing fills, are refused.

Axis letters as in `w8a8.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from reprise_engine.attention.bridge import ATTENTION_NAME, register_paged_attention
from reprise_engine.errors import DamagedModel, UnsupportedModel
from reprise_engine.models.files import ModelFiles
from reprise_engine.models.quantization import QuantizationPlan, Scheme
from reprise_engine.models.spec import ModelSpec
from reprise_engine.models.w8a8 import BiasedNorm, W8A8DynamicLinear, W8A8Experts, W8A8StaticLinear
from reprise_engine.parallel.layers import HEAD, drop_head
from reprise_engine.parallel.shard import CUT_BY_INPUTS, Place, rank_spec
from reprise_engine.parallel.weights import piece_of

_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_INT8_MOST_INPUTS = 2**17 - 1
"""More inputs, all at their largest, would not fit into a sum of 32 bits."""


class Tensors:
    """The tensors of a folder's safetensors, each to be taken once: what is left over was not understood.

    With a `place` they are that rank's parts, of which alone memory is taken. `spec` is the whole model's.
    """

    def __init__(self, files: ModelFiles, spec: ModelSpec, place: Place | None) -> None:
        self._spec = spec
        self.place = place
        self._opened: dict[str, Any] = {}
        for path in files.weight_paths():
            try:
                opened: Any = safe_open(path, framework="pt")
                self._opened |= dict.fromkeys(opened.keys(), opened)
            except (OSError, SafetensorError) as error:
                raise DamagedModel(f"The weights in {path} cannot be read: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._opened

    def names(self) -> list[str]:
        """Of those that were not taken."""
        return sorted(self._opened)

    def take(self, name: str) -> torch.Tensor:
        """Raises DamagedModel where there is none of that name, or none that ranks could have parts of."""
        shape = self.whole_shape(name)
        opened = self._opened.pop(name)
        try:
            tensor: torch.Tensor
            if self.place is None:
                tensor = opened.get_tensor(name)
            else:
                tensor = piece_of(name, opened.get_slice(name), shape, self._spec, self.place)[...]
        except (OSError, SafetensorError) as error:
            raise DamagedModel(f"{name} cannot be read: {error}") from error
        return tensor

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor in the files. Raises DamagedModel where there is none of that name."""
        opened = self._opened.get(name)
        if opened is None:
            raise DamagedModel(f"The weights lack {name}. The checkpoint is incomplete or its description another's.")
        return tuple(opened.get_slice(name).get_shape())

    def drop(self, name: str) -> None:
        """Of what is not needed."""
        self._opened.pop(name, None)


def load_quantized(
    files: ModelFiles, spec: ModelSpec, plan: QuantizationPlan, dtype: torch.dtype, *, place: Place | None = None
) -> PreTrainedModel:
    """The model in host memory, float tensors in `dtype`; with a `place` that rank's part of it, to be made whole by
    `connect_ranks`. `spec` is the whole model's. Raises DamagedModel or UnsupportedModel."""
    if files.weights != "safetensors":
        raise UnsupportedModel(
            f"{files.folder} has weights as {files.weights}; quantised ones are read as safetensors."
        )
    module = _empty_model(spec if place is None else rank_spec(spec, place.size), dtype)
    tensors = Tensors(files, spec, place)
    if place is not None and place.rank > 0:
        drop_head(module)
        plan = replace(plan, schemes={name: scheme for name, scheme in plan.schemes.items() if name != HEAD})
        for name in tensors.names():
            if name.startswith(f"{HEAD}."):
                tensors.drop(name)
    for name, scheme in _linear_layers(module, plan).items():
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        _replace(module, name, _read_linear(tensors, name, scheme, (linear.out_features, linear.in_features)))
    for name, child in list(module.named_modules()):
        if type(child).__name__ == "Qwen3MoeExperts":
            _fill_experts(module, name, child, plan, tensors)
    _fill_parameters(module, tensors, dtype)
    _fill_norm_biases(module, tensors)
    if tensors.names():
        raise UnsupportedModel(
            f"The weights in {files.folder} have {len(tensors.names())} tensors that {spec.architecture} does not, "
            f"among them {', '.join(tensors.names()[:3])}: another model's, or of quantisation that is not served."
        )
    return module


def _empty_model(spec: ModelSpec, dtype: torch.dtype) -> PreTrainedModel:
    register_paged_attention()
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION_NAME, "trust_remote_code": False}
    if spec.expert_size:
        options["experts_implementation"] = "eager"  # as in loader.py
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        module = make(spec.config, **options)
    assert isinstance(module, PreTrainedModel)
    # What is computed from the configuration and stored nowhere (the frequencies of RoPE) is computed again, in memory.
    for name, child in list(module.named_modules()):
        if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
            remake: Any = type(child)
            _replace(module, name, remake(spec.config))
    return module


def _linear_layers(module: PreTrainedModel, plan: QuantizationPlan) -> Mapping[str, Scheme]:
    """Those of the plan that are layers of the definition; experts are seen to elsewhere."""
    layers: dict[str, Scheme] = {}
    for name, scheme in plan.schemes.items():
        try:
            layer = module.get_submodule(name)
        except AttributeError:
            if _is_expert(module, name):
                continue
            raise UnsupportedModel(
                f"{name} in {plan.source} is {scheme}, but {type(module).__name__} has no such layer."
            ) from None
        if type(layer) is not nn.Linear:
            raise UnsupportedModel(
                f"{name} in {plan.source} is {scheme}, but it is a {type(layer).__name__}; linear layers and experts "
                "are served quantised."
            )
        layers[name] = scheme
    return layers


def _is_expert(module: PreTrainedModel, name: str) -> bool:
    parts = name.rsplit(".", 2)
    if len(parts) != 3 or not parts[1].isdigit() or parts[2] not in _EXPERT_PROJECTIONS:
        return False
    try:
        experts: Any = module.get_submodule(parts[0])
    except AttributeError:
        return False
    return type(experts).__name__ == "Qwen3MoeExperts" and int(parts[1]) < experts.num_experts


def _read_linear(
    tensors: Tensors, name: str, scheme: Scheme, shape: tuple[int, int]
) -> W8A8StaticLinear | W8A8DynamicLinear:
    outputs = shape[0]
    weight_OI = _read_weight(tensors, name, shape)
    _check_offset(tensors, name)
    bias = tensors.take(f"{name}.bias") if f"{name}.bias" in tensors else None
    if scheme == "W8A8":
        tensors.drop(f"{name}.weight_scale")  # of which deq_scale is made
        # `bias` is in quant_bias already (ascendv1.py, on_w8a8_static).
        input_offset_1 = _floats(tensors, f"{name}.input_offset", 1)
        quant_bias_O = _flat(tensors, f"{name}.quant_bias", outputs, torch.int32)
        if _is_later_part(tensors.place, name):
            quant_bias_O = _own_correction(weight_OI, input_offset_1)
        return W8A8StaticLinear(
            weight_OI=weight_OI,
            input_scale_1=_floats(tensors, f"{name}.input_scale", 1),
            input_offset_1=input_offset_1,
            deq_scale_O=_read_deq_scale(tensors, f"{name}.deq_scale", outputs),
            quant_bias_O=quant_bias_O,
        )
    for tensor in ("quant_bias", "input_scale", "input_offset", "deq_scale"):
        tensors.drop(f"{name}.{tensor}")  # of W8A8_MIX
    bias_O = None if bias is None else _checked(f"{name}.bias", bias, (outputs,)).to(torch.float32)
    return W8A8DynamicLinear(
        weight_OI=weight_OI, weight_scale_O=_floats(tensors, f"{name}.weight_scale", outputs), bias_O=bias_O
    )


def _is_later_part(place: Place | None, name: str) -> bool:
    """Whether what the layer computes here is a part of a sum, and not its first."""
    return place is not None and place.rank > 0 and name.rpartition(".")[2] in CUT_BY_INPUTS


def _own_correction(weight_OI: torch.Tensor, input_offset_1: torch.Tensor) -> torch.Tensor:
    """What takes back the offset of these inputs, (O,) int32: the share of quant_bias that belongs to them.

    vllm-ascend leaves all of it to the first rank. Then the parts are larger than what they add up to, by the offset
    times a sum of weights, and 16 bits, in which an NPU sums them, have less left for the rest.
    """
    sums_O = weight_OI.sum(1, dtype=torch.int32)
    return (-input_offset_1.double() * sums_O).round().to(torch.int32)


def _read_weight(tensors: Tensors, name: str, shape: tuple[int, int]) -> torch.Tensor:
    whole = tensors.whole_shape(f"{name}.weight")
    weight_OI = _checked(f"{name}.weight", tensors.take(f"{name}.weight"), shape)
    if weight_OI.dtype != torch.int8:
        raise DamagedModel(f"{name}.weight is {_word(weight_OI)}; a quantised one is int8.")
    if whole[1] > _INT8_MOST_INPUTS:
        raise UnsupportedModel(f"{name} has {whole[1]} inputs; quantised layers have at most {_INT8_MOST_INPUTS}.")
    return weight_OI


def _check_offset(tensors: Tensors, name: str) -> None:
    """Weights are symmetric: no operator takes an offset of theirs."""
    key = f"{name}.weight_offset"
    if key in tensors and tensors.take(key).count_nonzero():
        raise UnsupportedModel(
            f"{key} is not zero: weights that are not symmetric are not served. Quantise them with w_sym=True."
        )


def _read_deq_scale(tensors: Tensors, key: str, outputs: int) -> torch.Tensor:
    """float32, or the bits of float32 in int64, which is how float16 models are written (deqscale2int64)."""
    tensor = tensors.take(key)
    if tensor.dtype == torch.int64:
        tensor = tensor.to(torch.int32).view(torch.float32)
    return _scale(key, tensor, outputs)


def _floats(tensors: Tensors, key: str, count: int) -> torch.Tensor:
    return _scale(key, tensors.take(key), count)


def _scale(key: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    if tensor.numel() != count:
        raise UnsupportedModel(
            f"{key} has {tensor.numel()} values ({_word(tensor)}); {count} are served: one "
            f"{'a layer' if count == 1 else 'an output, none by group'}."
        )
    scale = tensor.reshape(count).to(torch.float32)
    if not scale.isfinite().all() or (key.endswith("scale") and not (scale > 0).all()):
        raise DamagedModel(f"{key} has values that are no scale: each must be a finite number above 0.")
    return scale.contiguous()


def _flat(tensors: Tensors, key: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensors.take(key)
    if tensor.dtype != dtype or tensor.numel() != count:
        raise DamagedModel(f"{key} is {_word(tensor)}; it must be {count} values of {dtype}.")
    return tensor.reshape(count).contiguous()


def _checked(key: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tensor.shape != shape:
        raise DamagedModel(f"{key} is {_word(tensor)}, but config.json asks for {list(shape)}.")
    return tensor


def _word(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _fill_experts(module: PreTrainedModel, name: str, experts: Any, plan: QuantizationPlan, tensors: Tensors) -> None:
    """The files have the experts one by one, the definition all in one tensor."""
    layers = [f"{name}.{index}.{which}" for index in range(experts.num_experts) for which in _EXPERT_PROJECTIONS]
    kinds = {plan.schemes.get(layer, "FLOAT") for layer in layers}
    if kinds == {"FLOAT"}:
        for part, projections in (("gate_up_proj", _EXPERT_PROJECTIONS[:2]), ("down_proj", _EXPERT_PROJECTIONS[2:])):
            matrices = [
                torch.cat([tensors.take(f"{name}.{index}.{projection}.weight") for projection in projections])
                for index in range(experts.num_experts)
            ]
            parameter: nn.Parameter = getattr(experts, part)
            setattr(experts, part, _parameter(f"{name}.{part}", torch.stack(matrices).to(parameter.dtype), parameter))
        return
    if kinds != {"W8A8_DYNAMIC"}:
        raise UnsupportedModel(
            f"The experts of {name} are {', '.join(sorted(kinds))} in {plan.source}; all of them must be "
            "W8A8_DYNAMIC, or all FLOAT."
        )
    inner, hidden = experts.intermediate_dim, experts.hidden_dim
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    read: dict[str, list[W8A8DynamicLinear]] = {which: [] for which in _EXPERT_PROJECTIONS}
    for index in range(experts.num_experts):
        for which, shape in shapes.items():
            layer = _read_linear(tensors, f"{name}.{index}.{which}", "W8A8_DYNAMIC", shape)
            assert isinstance(layer, W8A8DynamicLinear)
            read[which].append(layer)
    pairs = list(zip(read["gate_proj"], read["up_proj"], strict=True))
    _replace(
        module,
        name,
        W8A8Experts(
            gate_up_EOD=torch.stack([torch.cat([gate.weight, up.weight]) for gate, up in pairs]),
            gate_up_scale_EO=torch.stack([torch.cat([gate.weight_scale, up.weight_scale]) for gate, up in pairs]),
            down_EDM=torch.stack([down.weight for down in read["down_proj"]]),
            down_scale_ED=torch.stack([down.weight_scale for down in read["down_proj"]]),
            act_fn=experts.act_fn,
        ),
    )


def _fill_parameters(module: PreTrainedModel, tensors: Tensors, dtype: torch.dtype) -> None:
    """Puts float tensors where the definition has parameters without memory; then ties what is tied."""
    tied = bool(getattr(module.config, "tie_word_embeddings", False))
    head: Any = getattr(module, "lm_head", None)
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if not parameter.is_meta or (tied and name == "lm_head.weight"):
            continue
        tensor = tensors.take(name)
        if not tensor.is_floating_point():
            raise DamagedModel(f"{name} is {_word(tensor)}, but its description does not call it quantised.")
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, _parameter(name, tensor.to(dtype), parameter))
    for name in tensors.names():
        if name.endswith("rotary_emb.inv_freq"):
            tensors.drop(name)  # computed from the configuration
    if tied and isinstance(head, nn.Linear):
        embedding = module.get_input_embeddings().weight
        assert isinstance(embedding, nn.Parameter)
        head.weight = embedding
        if "lm_head.weight" in tensors:
            own = tensors.take("lm_head.weight").to(dtype)
            if not torch.equal(own, embedding):  # a rotation, say, that changed one of them: it counts, as is
                head.weight = _parameter("lm_head.weight", own, embedding)


def _parameter(name: str, tensor: torch.Tensor, instead_of: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_checked(name, tensor, tuple(instead_of.shape)).contiguous(), requires_grad=False)


def _fill_norm_biases(module: PreTrainedModel, tensors: Tensors) -> None:
    """What the smoothing of outliers leaves behind norms. All zeros are nothing; else all norms that have one get it,
    so that layers stay alike."""
    biases = {name: tensors.take(name) for name in tensors.names() if _is_norm_bias(module, name)}
    if not any(bias_D.count_nonzero() for bias_D in biases.values()):
        return
    for name, bias_D in biases.items():
        norm: Any = module.get_submodule(name.removesuffix(".bias"))
        checked_D = _checked(name, bias_D, tuple(norm.weight.shape)).to(norm.weight.dtype)
        _replace(module, name.removesuffix(".bias"), BiasedNorm(norm, checked_D))


def _is_norm_bias(module: PreTrainedModel, name: str) -> bool:
    layer, _, leaf = name.rpartition(".")
    try:
        return leaf == "bias" and type(module.get_submodule(layer)).__name__.endswith("RMSNorm")
    except AttributeError:
        return False


def _replace(module: nn.Module, name: str, replacement: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, replacement)
