"""The operator's argv for vllm-ascend is vLLM's: parsed by its flags as recorded, and where it is found by itself."""

from __future__ import annotations

from typing import Any

import pytest

from reprise_operator.children.profiles import PROFILES
from reprise_operator.plan import plan
from reprise_operator.settings import ENGINE_PORT, Settings
from reprise_operator.spec import RESERVED_FLAGS, parse
from tests.contract.vllm_parser import missing, real_answers, recorded, recorded_parser
from tests.support.factories import merged

Spec = dict[str, Any]
PLAINEST: Spec = {
    "model": {"uri": "pvc://claim/folder", "maxModelLen": 4096},
    "runtime": {"name": "vllm-ascend"},
    "accelerator": {"profile": "ascend910b"},
}
OFF: Spec = {"prefixCaching": {"enabled": False}}

CASES: dict[str, tuple[Spec, dict[str, Any]]] = {
    "plainest": (
        {},
        {
            "model_tag": "/model/folder",
            "served_model_name": ["svc"],
            "port": ENGINE_PORT,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": 4096,
            "max_model_len": 4096,
            "gpu_memory_utilization": 0.9,
        },
    ),
    "served name": ({"model": {"servedName": "org/name"}}, {"served_model_name": ["org/name"]}),
    "64k": (
        {"model": {"maxModelLen": 65_536}},
        {"max_model_len": 65_536, "max_num_batched_tokens": 65_536, "gpu_memory_utilization": 0.85},
    ),
    "short": ({"model": {"maxModelLen": 256}}, {"max_model_len": 256, "max_num_batched_tokens": 2048}),
    "caching off": (
        OFF,
        {"enable_prefix_caching": False, "enable_chunked_prefill": None, "max_num_batched_tokens": None},
    ),
    "caching off, chunked": (
        merged(OFF, {"chunkedPrefill": {"enabled": True}}),
        {"enable_prefix_caching": False, "enable_chunked_prefill": True},
    ),
    "caching off, whole": (merged(OFF, {"chunkedPrefill": {"enabled": False}}), {"enable_chunked_prefill": False}),
    "block": ({"prefixCaching": {"blockSize": 128}}, {"block_size": 128}),
    **{
        f"hash {name}": ({"prefixCaching": {"hashAlgorithm": name}}, {"prefix_caching_hash_algo": name})
        for name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
    },
    "isolation none": ({"prefixCaching": {"isolation": "none"}}, {"enable_prefix_caching": True}),
    **{
        f"dtype {name}": ({"model": {"dtype": name}}, {"dtype": name})
        for name in ("auto", "float32", "bfloat16", "float16")
    },
    "utilization": ({"memory": {"utilization": 0.55}}, {"gpu_memory_utilization": 0.55}),
    "devices": ({"accelerator": {"count": 4}}, {"tensor_parallel_size": 4}),
    "extra": ({"runtime": {"extraArgs": ["--max_num_seqs=7"]}}, {"max_num_seqs": 7}),
    **{
        f"profile {name}": (
            {"accelerator": {"profile": name}},
            {
                **({"enforce_eager": True} if profile.eager else {}),
                **({"dtype": profile.dtype} if profile.dtype else {}),
                **({"tensor_parallel_size": profile.minimum} if profile.minimum > 1 else {}),
            },
        )
        for name, profile in PROFILES.items()
        if profile.is_npu
    },
}


def argv(spec: Spec) -> list[str]:
    """From "serve" on; the image's command begins with vllm."""
    body = {
        "metadata": {"name": "svc", "namespace": "ns", "uid": "u1", "generation": 1},
        "spec": merged(PLAINEST, spec),
    }
    (container,) = plan(parse(body), Settings()).workload["spec"]["template"]["spec"]["containers"]
    vllm, *rest = container["args"]
    assert vllm == "vllm"
    return [str(argument) for argument in rest]


@pytest.mark.parametrize("case", CASES)
def test_every_field_is_a_flag_of_vllm_as_recorded(case: str) -> None:
    spec, expected = CASES[case]
    arguments = [argument.replace("_", "-") if argument.startswith("--") else argument for argument in argv(spec)]
    understood = vars(recorded_parser().parse_args(arguments))
    assert {name: understood[name] for name in expected} == expected


def test_a_flag_that_vllm_does_not_have_is_found_out() -> None:
    with pytest.raises(ValueError, match="--prefix-cache-dir"):
        recorded_parser().parse_args([*argv({}), "--prefix-cache-dir=/x"])
    with pytest.raises(ValueError, match="int4"):
        recorded_parser().parse_args([*argv({}), "--dtype", "int4"])


def test_reserved_flags_are_vllms_or_only_ours() -> None:
    """A typing error in the list would leave a flag free to be set twice."""
    ours = {flag for flag in RESERVED_FLAGS if flag.startswith(("prefix-cache-", "warmup-"))}
    assert set(RESERVED_FLAGS) - set(recorded()["flags"]) == ours


def test_vllms_own_parser_understands_the_same() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    bad = ["serve", "/model", "--no-such-flag"]
    *answers, refused = real_answers([*(argv(spec) for spec, _ in CASES.values()), bad])
    assert "error" in refused
    for (name, (_, expected)), understood in zip(CASES.items(), answers, strict=True):
        assert "error" not in understood, (name, understood)
        assert {key: understood[key] for key in expected} == expected, name
