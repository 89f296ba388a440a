"""The operator's argv parses in the engine's own parser and means what the spec says, for every field of the spec.

The two distributions share no code, so this is what keeps them one product.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise_engine.config import MAX_TENSOR_PARALLEL_SIZE, HashAlgorithm
from reprise_engine.entrypoints.arguments import (
    ISOLATION_VARIABLE,
    ArgumentParser,
    add_serve_arguments,
    build_parser,
    server_options,
)
from reprise_engine.entrypoints.http_arguments import API_KEY_VARIABLES
from reprise_engine.server import pinning
from reprise_engine.server.options import ServerOptions
from reprise_operator.cache_checks import API_KEY_ENV
from reprise_operator.children.args import MODEL_MOUNT
from reprise_operator.children.prefix_cache import CACHE_MOUNT, ISOLATION_SECRET_ENV, WARMUP_SECONDS, prompts_file
from reprise_operator.children.profiles import PROFILES
from reprise_operator.plan import plan
from reprise_operator.settings import ENGINE_PORT, Settings
from reprise_operator.spec import RESERVED_FLAGS, SpecError, parse

Spec = dict[str, Any]


def container(spec: Spec) -> Mapping[str, Any]:
    """The engine container that the operator makes of a spec; a field of `spec` replaces that of the plainest one."""
    plainest: Spec = {"model": {"uri": "pvc://claim/folder"}, "accelerator": {"profile": "cpu"}}
    body = {
        "metadata": {"name": "svc", "namespace": "ns", "uid": "u1", "generation": 1},
        "spec": plainest | spec,
    }
    template = plan(parse(body), Settings()).workload["spec"]["template"]
    (only,) = template["spec"]["containers"]
    found: Mapping[str, Any] = only
    return found


def understood(spec: Spec, environment: Mapping[str, str] | None = None) -> ServerOptions:
    """What the engine understands of it."""
    args = container(spec)["args"]
    return server_options(build_parser().parse_args(args), environment or {})


def test_the_plainest_spec_is_understood_in_full() -> None:
    options = understood({})
    assert options.engine.model.model == f"{MODEL_MOUNT}/folder"
    assert options.served_names == ("svc",)
    assert options.port == ENGINE_PORT
    assert options.host == "0.0.0.0", "the probes come to the pod's address"
    assert options.engine.cache.enable_prefix_caching
    assert options.engine.scheduler.enable_chunked_prefill
    assert options.engine.model.max_model_len is None
    assert options.engine.cache.gpu_memory_utilization == 0.9


def of(path: str) -> Any:
    """Getter of a dotted attribute of ServerOptions."""

    def read(options: ServerOptions) -> Any:
        value: Any = options
        for name in path.split("."):
            value = getattr(value, name)
        return value

    return read


MODEL = {"uri": "pvc://claim/folder"}
WARMUP: Spec = {"prefixCaching": {"warmup": {"prompts": ["You are"], "timeoutSeconds": 45}}}


@pytest.mark.parametrize(
    ("spec", "attribute", "expected"),
    [
        ({"model": {"uri": "pvc://claim"}}, "engine.model.model", MODEL_MOUNT),
        ({"model": {"uri": "hostpath:///models/m"}}, "engine.model.model", MODEL_MOUNT),
        ({"model": {"uri": "hostpath:///models/m.gguf"}}, "engine.model.model", f"{MODEL_MOUNT}/m.gguf"),
        ({"model": {"uri": "pvc://claim/a/m.gguf"}}, "engine.model.model", f"{MODEL_MOUNT}/a/m.gguf"),
        ({"model": {**MODEL, "servedName": "org/name"}}, "served_names", ("org/name",)),
        ({"model": {**MODEL, "maxModelLen": 8192}}, "engine.model.max_model_len", 8192),
        *(
            ({"model": {**MODEL, "dtype": dtype}}, "engine.model.dtype", dtype)
            for dtype in ("auto", "float32", "bfloat16", "float16")
        ),
        ({"accelerator": {"profile": "ascend310p"}}, "engine.enforce_eager", True),
        ({"accelerator": {"profile": "ascend310p"}}, "engine.model.dtype", "float16"),
        ({"accelerator": {"profile": "ascend910b"}}, "engine.enforce_eager", False),
        ({"prefixCaching": {"enabled": True}}, "engine.cache.enable_prefix_caching", True),
        ({"prefixCaching": {"enabled": False}}, "engine.cache.enable_prefix_caching", False),
        ({"prefixCaching": {"blockSize": 64}}, "engine.cache.block_size", 64),
        *(
            ({"prefixCaching": {"hashAlgorithm": algorithm}}, "engine.cache.prefix_caching_hash_algo", algorithm)
            for algorithm in get_args(HashAlgorithm)
        ),
        ({"prefixCaching": {"isolation": "none"}}, "prefix_cache_isolation", "none"),
        ({"prefixCaching": {"hostMemory": "1.5Gi"}}, "engine.cache.prefix_cache_host_memory", 3 * 2**29),
        ({"prefixCaching": {"hostMemory": 0}}, "engine.cache.prefix_cache_host_memory", 0),
        ({"prefixCaching": {"persistence": {"claimName": "c"}}}, "engine.cache.prefix_cache_dir", Path(CACHE_MOUNT)),
        ({"prefixCaching": {"persistence": {"claimName": "c"}}}, "engine.cache.prefix_cache_disk_size", None),
        ({"prefixCaching": {"persistence": {"size": "100G"}}}, "engine.cache.prefix_cache_dir", Path(CACHE_MOUNT)),
        ({"prefixCaching": {"persistence": {"size": "100G"}}}, "engine.cache.prefix_cache_disk_size", 90 * 10**9),
        (
            {"prefixCaching": {"persistence": {"claimName": "c", "limit": "2Ti"}}},
            "engine.cache.prefix_cache_disk_size",
            2 * 2**40,
        ),
        (WARMUP, "warmup_prompts", Path("/etc/reprise/warmup/prompts.jsonl")),
        (WARMUP, "warmup_timeout", 45.0),
        (
            {"prefixCaching": {"warmup": {"configMapKeyRef": {"name": "m", "key": "lines"}}}},
            "warmup_prompts",
            Path("/etc/reprise/warmup/prompts.txt"),
        ),
        ({"memory": {"utilization": 0.55}}, "engine.cache.gpu_memory_utilization", 0.55),
        ({"model": {**MODEL, "maxModelLen": 65_536}}, "engine.cache.gpu_memory_utilization", 0.85),
        ({"chunkedPrefill": {"enabled": True}}, "engine.scheduler.enable_chunked_prefill", True),
        (
            {"chunkedPrefill": {"enabled": False}, "model": {**MODEL, "maxModelLen": 8192}},
            "engine.scheduler.enable_chunked_prefill",
            False,
        ),
        (
            {"chunkedPrefill": {"enabled": False}, "model": {**MODEL, "maxModelLen": 8192}},
            "engine.scheduler.max_num_batched_tokens",
            8192,
        ),
        ({"runtime": {"extraArgs": ["--max-num-seqs", "7"]}}, "engine.scheduler.max_num_seqs", 7),
        ({"runtime": {"extraArgs": ["--max_num_seqs=7"]}}, "engine.scheduler.max_num_seqs", 7),
        ({"runtime": {"extraArgs": ["--quantization", "ascend"]}}, "engine.model.quantization", "ascend"),
        (
            {"runtime": {"extraArgs": ["--override-generation-config", '{"temperature": 0, "stop": ["a b"]}']}},
            "override_generation_config",
            {"temperature": 0, "stop": ["a b"]},
        ),
    ],
)
def test_a_field_of_the_spec_reaches_the_engine(spec: Spec, attribute: str, expected: Any) -> None:
    assert of(attribute)(understood(spec)) == expected


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_profile_makes_an_argv_that_the_engine_takes(profile: str) -> None:
    options = understood({"accelerator": {"profile": profile}})
    assert options.engine.device == ("npu" if PROFILES[profile].is_npu else "auto")
    assert options.engine.model.dtype == (PROFILES[profile].dtype or "auto")


@pytest.mark.parametrize(
    ("accelerator", "ranks"),
    [
        ({"profile": "cpu"}, 1),
        ({"profile": "ascend910"}, 1),
        ({"profile": "ascend910", "count": 4}, 4),
        ({"profile": "ascend910b", "count": 16}, MAX_TENSOR_PARALLEL_SIZE),
        # A card is two devices, and all that a pod holds compute.
        ({"profile": "ascend910c"}, 2),
        ({"profile": "cce-ascend910c", "count": 8}, 8),
        ({"profile": "ascend910c", "resourceName": "huawei.com/Ascend910-16c"}, 1),
        ({"profile": "hami-ascend910b3", "count": 2}, 2),
    ],
)
def test_the_devices_of_a_pod_compute_together(accelerator: Spec, ranks: int) -> None:
    made = {"accelerator": accelerator}
    assert understood(made).engine.tensor_parallel_size == ranks
    assert ("--tensor-parallel-size" in container(made)["args"]) is (ranks > 1)


@pytest.mark.parametrize(("accelerator", "ranks"), [({"count": 4}, 4), ({"profile": "ascend910c"}, 2)])
@pytest.mark.parametrize("flag", ["--quantization=ascend", "-qascend"])
def test_quantised_weights_are_divided_among_the_devices_as_others_are(
    flag: str, accelerator: Spec, ranks: int
) -> None:
    options = understood({"accelerator": accelerator, "runtime": {"extraArgs": [flag]}}).engine
    assert (options.model.quantization, options.tensor_parallel_size) == ("ascend", ranks)


@pytest.mark.parametrize("flag", [["--device=cpu"], ["--device", "cpu"]])
def test_the_engine_may_be_told_to_leave_the_npu_alone(flag: list[str]) -> None:
    made = {"accelerator": {"profile": "ascend910c"}, "runtime": {"extraArgs": flag}}
    assert understood(made).engine.device == "cpu"
    assert understood(made).engine.tensor_parallel_size == 1
    assert "npu" not in container(made)["args"]


@pytest.mark.parametrize("replicas", [0, 3])
def test_fields_that_concern_kubernetes_alone_leave_the_argv_as_it_is(replicas: int) -> None:
    elsewhere: Spec = {
        "replicas": replicas,
        "suspend": True,
        "service": {"type": "NodePort", "port": 80, "sessionAffinity": "ClientIP"},
        "podTemplate": {"nodeSelector": {"a": "b"}, "priorityClassName": "high"},
        "runtime": {"image": "x:1", "env": [{"name": "A", "value": "b"}], "resources": {"limits": {"cpu": "2"}}},
        "auth": {"apiKeySecretRef": {"name": "keys", "key": "k"}},
    }
    assert container(elsewhere)["args"] == container({})["args"]


def test_the_key_of_the_secret_is_taken_from_the_environment_and_never_from_an_argument() -> None:
    made = container({"auth": {"apiKeySecretRef": {"name": "keys", "key": "k"}}})
    (entry,) = (entry for entry in made["env"] if "secretKeyRef" in (entry.get("valueFrom") or {}))
    assert entry["name"] in API_KEY_VARIABLES
    assert server_options(build_parser().parse_args(made["args"]), {entry["name"]: "s3cret"}).api_keys == ("s3cret",)


def test_isolation_per_key_with_the_secret_of_its_own() -> None:
    spec: Spec = {
        "prefixCaching": {"isolation": "perKey", "isolationSecretRef": {"name": "salt"}},
        "auth": {"apiKeySecretRef": {"name": "keys"}},
    }
    made = container(spec)
    references = {
        entry["name"]: entry["valueFrom"]["secretKeyRef"]["name"]
        for entry in made["env"]
        if "secretKeyRef" in (entry.get("valueFrom") or {})
    }
    assert references == {"REPRISE_API_KEY": "keys", ISOLATION_VARIABLE: "salt"}
    content = {"keys": "one\ntwo\n", "salt": "0123456789abcdef"}
    options = understood(spec, {name: content[secret] for name, secret in references.items()})
    assert options.prefix_cache_isolation == "per-key"
    assert options.prefix_cache_isolation_secret == "0123456789abcdef"
    assert options.api_keys == ("one", "two")


def test_names_that_both_sides_know() -> None:
    assert ISOLATION_SECRET_ENV == ISOLATION_VARIABLE
    assert set(API_KEY_ENV) == set(API_KEY_VARIABLES)
    parser = ArgumentParser()
    add_serve_arguments(parser, positional_model=True)
    assert parser.get_default("warmup_timeout") == WARMUP_SECONDS, "a pod's probe waits for as long as the engine does"


def test_the_engine_reads_the_prompts_that_the_operator_writes(tmp_path: Path) -> None:
    prompts = ["You are helpful.\nBe brief.", '{"quoted": "\u2028"}', "  spaces  ", "x" * 5000]
    file = tmp_path / "prompts.jsonl"
    file.write_text(prompts_file(prompts), encoding="utf-8")
    read = pinning._read(file)
    assert [body.prompt for _, body in read if not isinstance(body, str)] == prompts


def test_with_the_cache_off_the_engine_is_told_nothing_more_of_it() -> None:
    """It refuses tiers without a cache: switching it off must be one field."""
    options = understood(
        {
            "prefixCaching": {
                "enabled": False,
                "hashAlgorithm": "xxhash",
                "isolation": "perKey",
                "isolationSecretRef": {"name": "salt"},
                "hostMemory": "8Gi",
                "persistence": {"size": "1Gi"},
                "warmup": {"prompts": ["a"]},
            },
            "auth": {"apiKeySecretRef": {"name": "keys"}},
        },
        {"REPRISE_API_KEY": "k"},
    )
    assert not options.engine.cache.enable_prefix_caching
    assert options.warmup_prompts is None


def engine_flags() -> set[str]:
    """Long flags of `reprise serve`, without the dashes and the no- forms."""
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action.choices, dict))
    assert isinstance(commands.choices, dict)
    strings = (option for action in commands.choices["serve"]._actions for option in action.option_strings)
    return {option.removeprefix("--") for option in strings if option.startswith("--") and option[:5] != "--no-"}


def test_flags_that_a_field_renders_exist_in_the_engine_or_are_vllm_s_own() -> None:
    """A typing error in the list of reserved flags would leave a flag free to be set twice."""
    of_later_releases_or_vllm = {"tokenizer-revision"}
    assert set(RESERVED_FLAGS) - engine_flags() == of_later_releases_or_vllm


@pytest.mark.parametrize("flag", sorted(RESERVED_FLAGS))
@pytest.mark.parametrize("form", ["--{}", "--{}=1", "--no-{}", "--{} 1"])
def test_an_extra_argument_cannot_repeat_what_a_field_says(flag: str, form: str) -> None:
    for spelled in (flag, flag.replace("-", "_")):
        with pytest.raises(SpecError) as refused:
            container({"runtime": {"extraArgs": [form.format(spelled)]}})
        assert refused.value.reason == "InvalidSpec"
        assert spelled in refused.value.message


def test_an_argument_that_the_engine_does_not_know_ends_it_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        understood({"runtime": {"extraArgs": ["--no-such-thing"]}})
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--no-such-thing" in line


@given(
    enabled=st.none() | st.booleans(),
    block=st.none() | st.integers(1, 512),
    length=st.none() | st.integers(1, 200_000),
    utilization=st.none() | st.integers(1, 98).map(lambda percent: percent / 100),
    chunked=st.none() | st.booleans(),
    host=st.none() | st.sampled_from(["1Gi", "0", "123M"]),
    volume=st.none() | st.fixed_dictionaries({"size": st.sampled_from(["1Gi", 5_000_000_001])}),
    warm=st.none() | st.fixed_dictionaries({"prompts": st.just(["a"]), "timeoutSeconds": st.integers(1, 86_400)}),
    name=st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,40}", fullmatch=True),
)
def test_any_combination_of_fields_means_to_the_engine_what_it_says(
    enabled: bool | None,
    block: int | None,
    length: int | None,
    utilization: float | None,
    chunked: bool | None,
    host: str | None,
    volume: Spec | None,
    warm: Spec | None,
    name: str | None,
) -> None:
    spec: Spec = {
        "model": MODEL | _given(servedName=name, maxModelLen=length),
        "prefixCaching": _given(enabled=enabled, blockSize=block, hostMemory=host, persistence=volume, warmup=warm),
        "memory": _given(utilization=utilization),
        "chunkedPrefill": _given(enabled=chunked),
    }
    if chunked is False and length is None:
        with pytest.raises(SpecError, match="maxModelLen is needed"):
            container(spec)
        return
    options = understood(spec)
    assert options.served_names == (name or "svc",)
    assert options.engine.model.max_model_len == length
    assert options.engine.cache.enable_prefix_caching is (enabled is not False)
    assert options.engine.cache.block_size == block
    assert options.engine.scheduler.enable_chunked_prefill is (chunked is not False)
    on = enabled is not False
    assert (options.engine.cache.prefix_cache_dir is not None) is (on and volume is not None)
    assert (options.warmup_prompts is not None) is (on and warm is not None)
    assert (options.engine.cache.prefix_cache_host_memory > 0) is (on and host not in (None, "0"))
    share = options.engine.cache.gpu_memory_utilization
    assert share == utilization if utilization is not None else 0.85 <= share <= 0.9


def _given(**fields: Any) -> Spec:
    return {name: value for name, value in fields.items() if value is not None}
