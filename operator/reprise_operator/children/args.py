"""argv of the engine. A list of strings handed over as it is: no shell ever reads it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from reprise_operator.children.accelerator import device_count, profile_of
from reprise_operator.children.memory import MemoryPlan
from reprise_operator.children.prefix_cache import cache_args
from reprise_operator.naming import digest
from reprise_operator.resource import ClaimModel, FetchedModel, HostPathModel, InferenceService
from reprise_operator.settings import ENGINE_PORT
from reprise_operator.spec_types import Runtime

MODEL_MOUNT = "/model"
"""Where the model's folder is mounted, read-only, in every engine container."""
MINIMUM_BATCHED_TOKENS = 2048


def model_path(service: InferenceService) -> str:
    """Path of the model inside the container: the mounted folder, or a .gguf file or folder in it."""
    match service.source:
        case HostPathModel(path=path):
            return f"{MODEL_MOUNT}/{path.rpartition('/')[2]}" if is_file(path) else MODEL_MOUNT
        case ClaimModel(path=path):
            return f"{MODEL_MOUNT}/{path}" if path else MODEL_MOUNT
        case FetchedModel(location=location) as source:
            folder = f"{MODEL_MOUNT}/{fetched_folder(source)}"
            return f"{folder}/{location.rpartition('/')[2]}" if is_file(location) else folder


def fetched_folder(source: FetchedModel) -> str:
    """Name of a fetched model's folder on its volume: readable, and another for another URI or revision."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", source.location)[:48].strip("-.")
    return f"{source.scheme}-{readable}-{digest([source.uri, source.revision], length=12)}"


def is_file(path: str) -> bool:
    """Whether a model path names one file rather than a folder."""
    return path.lower().endswith(".gguf")


def literal(text: str) -> str:
    """Kubernetes expands $(NAME) in arguments: a path or a name that holds one must stay as it is."""
    return text.replace("$", "$$")


def engine_args(service: InferenceService, memory: MemoryPlan) -> list[str]:
    """The container's args. Prefix caching is always said explicitly, since engines default to on.

    The `command` is left to the image: ours begins with `reprise`, and that of vllm-ascend's base image sets the CANN
    environment and executes its arguments unchanged.
    """
    if service.spec.runtime.name is Runtime.VLLM_ASCEND:
        return ["vllm", *_serve(service, memory), *_vllm_ascend(service), *service.spec.runtime.extra_args]
    return [*_serve(service, memory), *_reprise(service), *service.spec.runtime.extra_args]


def _serve(service: InferenceService, memory: MemoryPlan) -> list[str]:
    model = service.spec.model
    args = ["serve", literal(model_path(service)), "--served-model-name", literal(service.served_name)]
    args += ["--port", str(ENGINE_PORT)]
    args += ["--gpu-memory-utilization", f"{memory.effective:g}"]
    args.append(_switch("enable-prefix-caching", on=service.prefix_caching))
    if service.spec.prefix_caching.block_size is not None:
        args += ["--block-size", str(service.spec.prefix_caching.block_size)]
    if service.spec.prefix_caching.hash_algorithm is not None:
        args += ["--prefix-caching-hash-algo", service.spec.prefix_caching.hash_algorithm]
    if model.max_model_len is not None:
        args += ["--max-model-len", str(model.max_model_len)]
    only = profile_of(service).dtype
    dtype = only if only is not None and model.dtype == "auto" else model.dtype or only
    if dtype is not None:
        args += ["--dtype", dtype]
    return args


def _reprise(service: InferenceService) -> list[str]:
    args = []
    extra = service.spec.runtime.extra_args
    if profile_of(service).is_npu and not _has(extra, "device"):
        # Left to itself the engine would serve on the CPU where its image or the node lacks what the NPU needs, slowly
        # and with the NPU idle. Told so, it ends and says what is missing.
        args += ["--device", "npu"]
    if not _on_cpu(extra):
        args += _together(service)
    args += _eager(service)
    chunked = service.spec.chunked_prefill.enabled
    if chunked is not None:
        args.append(_switch("enable-chunked-prefill", on=chunked))
    if chunked is False:
        args += _whole_prompts(service)
    return args + cache_args(service)


def _vllm_ascend(service: InferenceService) -> list[str]:
    chunked = service.spec.chunked_prefill.enabled
    args = []
    if service.prefix_caching:
        # That runtime cannot combine the two, so a whole prompt must fit into one step.
        args += [_switch("enable-chunked-prefill", on=False), *_whole_prompts(service)]
    elif chunked is not None:
        args.append(_switch("enable-chunked-prefill", on=chunked))
    return args + _together(service) + _eager(service)


def _eager(service: InferenceService) -> list[str]:
    """The flag of both engines for chips that capture no graphs."""
    if not profile_of(service).eager or _has(service.spec.runtime.extra_args, "enforce-eager"):
        return []
    return ["--enforce-eager"]


def _together(service: InferenceService) -> list[str]:
    devices = device_count(service)
    return ["--tensor-parallel-size", str(devices)] if devices > 1 else []


def _on_cpu(arguments: Sequence[str]) -> bool:
    """Whether the user has the engine leave the NPUs alone: one process then, not one for each of them."""
    given = " ".join(arguments).replace("=", " ").split()
    return any(pair == ("--device", "cpu") for pair in pairwise(given))


def _whole_prompts(service: InferenceService) -> list[str]:
    length = service.spec.model.max_model_len
    if length is None or _has(service.spec.runtime.extra_args, "max-num-batched-tokens"):
        return []
    return ["--max-num-batched-tokens", str(max(length, MINIMUM_BATCHED_TOKENS))]


def _switch(flag: str, *, on: bool) -> str:
    return f"--{flag}" if on else f"--no-{flag}"


def _has(arguments: Sequence[str], flag: str) -> bool:
    pattern = re.compile(rf"^--(no-)?{flag}(=.*)?$", re.DOTALL)
    return any(pattern.match(argument.replace("_", "-")) for argument in arguments)
