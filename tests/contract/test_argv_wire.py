"""The operator reads what the engine says: metric names, probes, ports and last words agree, with no code shared."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from reprise_engine import errors
from reprise_engine.config import ResolvedConfig
from reprise_engine.messages import SchedulerStats
from reprise_engine.server.app import create_app
from reprise_engine.server.metrics import Metrics
from reprise_engine.server.state import ServerState
from reprise_operator.diagnosis import State
from reprise_operator.exposition import parse_metrics
from reprise_operator.plan import Plan
from reprise_operator.readiness import diagnose
from reprise_operator.settings import ENGINE_PORT
from tests.support.factories import NOW, container, failing, failure, planned
from tests.support.tiny_models import write_tokenizer

RESOLVED = ResolvedConfig(
    block_size=128,
    num_gpu_blocks=4321,
    max_model_len=32_768,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    enable_prefix_caching=True,
    enable_chunked_prefill=True,
    gpu_memory_utilization=0.85,
    device="npu",
    dtype="bfloat16",
    vocab_size=151_936,
    eos_token_ids=(1,),
    version="9.8.7",
)
CPU = {"accelerator": {"profile": "cpu"}}
KEYED = {"auth": {"apiKeySecretRef": {"name": "keys"}}}


def test_every_figure_of_the_engine_is_read_by_the_operator() -> None:
    metrics = Metrics("smollm2")
    metrics.configured(RESOLVED)
    metrics.engine_stats(SchedulerStats(kv_cache_usage=0.25, prefix_cache_queries=1000, prefix_cache_hits=750))
    metrics.engine_stats(SchedulerStats(kv_cache_usage=0.5, prefix_cache_queries=1600, prefix_cache_hits=1200))
    seen = parse_metrics(metrics.render().decode(), scraped_at=12.0)
    assert seen.enable_prefix_caching is True
    assert (seen.prefix_cache_queries, seen.prefix_cache_hits) == (1600, 1200)
    assert seen.kv_cache_usage == 0.5
    assert seen.gpu_memory_utilization == 0.85
    assert (seen.block_size, seen.num_gpu_blocks, seen.max_model_len) == (128, 4321, 32_768)
    assert seen.version == "9.8.7"
    assert seen.scraped_at == 12.0


def test_a_cache_that_is_off_is_seen_as_off() -> None:
    metrics = Metrics("smollm2")
    metrics.configured(replace(RESOLVED, enable_prefix_caching=False))
    assert parse_metrics(metrics.render().decode(), scraped_at=0.0).enable_prefix_caching is False


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_ask_a_path_that_the_server_answers_without_a_key(probe: str) -> None:
    made = container(planned({**CPU, **KEYED}))
    get = made[probe]["httpGet"]
    state = ServerState(model="m", served_names=("m",), metrics=Metrics("m"))
    with TestClient(create_app(state, api_keys=("secret",))) as client:
        assert client.get(get["path"]).status_code == 503, "not ready while the model loads"
        assert client.get("/metrics").status_code == 200, "the scraper has no key"
        assert client.get("/v1/models").status_code == 401
    (port,) = (port for port in made["ports"] if port["name"] == get["port"])
    assert port["containerPort"] == ENGINE_PORT


def test_the_service_s_port_and_the_engine_s_are_one() -> None:
    made = planned(CPU)
    args = container(made)["args"]
    assert args[args.index("--port") + 1] == str(ENGINE_PORT)
    (port,) = made.network_service["spec"]["ports"]
    assert port["targetPort"] in {"http", ENGINE_PORT}


def diagnosed(made: Plan, words: str, *, exit_code: int) -> tuple[State, str, str]:
    """State, reason and message of a service whose one pod ended with these last words."""
    crash = failure("Error", words=words, code=exit_code, restarts=1)
    found = diagnose(made, failing(made, crash), now=NOW)
    return found.state, found.reason, found.message


@pytest.mark.parametrize(
    ("arguments", "config", "reason", "told"),
    [
        (["--max-model-len", "128"], None, "ModelNotFound", "model"),
        ([], {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}, "UnsupportedModel", "Llava"),
        (["--gpu-memory-utilization", "1.5"], None, "InvalidArguments", "1.5"),
        (["--no-such-thing"], None, "InvalidArguments", "--no-such-thing"),
        (["--block-size", "many"], None, "InvalidArguments", "many"),
        (["--enable-lora"], None, "InvalidArguments", "LoRA"),
        (["--device", "npu"], None, "DeviceNotFound", "--device is npu"),
    ],
)
def test_how_the_engine_ends_is_what_the_operator_reports(
    tmp_path: Path, arguments: list[str], config: dict[str, Any] | None, reason: str, told: str
) -> None:
    """The real process, and the kubelet's rule: the termination log, else the tail of the container's log."""
    model = tmp_path / "model"
    if config is not None:
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        write_tokenizer(model)
        (model / "model.safetensors").touch()
    termination_log = tmp_path / "termination-log"
    termination_log.touch()
    command = [sys.executable, "-m", "reprise_engine.entrypoints.cli", "serve", str(model), "--host", "127.0.0.1"]
    ended = subprocess.run(
        [*command, "--port", "0", *arguments],
        env={**os.environ, "TERMINATION_LOG_PATH": str(termination_log)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode in {1, 2}
    words = termination_log.read_text() or ended.stderr[-2048:]
    assert "Traceback" not in ended.stderr
    state, found, message = diagnosed(planned(CPU), words, exit_code=ended.returncode)
    assert (state, found) == (State.STALLED, reason), words
    assert told in message


_TAKEN = """
import types, torch

def set_device(device):
    raise RuntimeError("SetDevice(device), error code is 507033\\nEL0005: The resources are busy.")

torch.utils.rename_privateuse1_backend("npu")
torch.npu = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, set_device=set_device)
"""


def test_an_npu_that_somebody_else_has_is_the_machine_s_fault(tmp_path: Path) -> None:
    """No flag cures it: exit code 1, so that the kubelet's next try may find it free."""
    (tmp_path / "torch_npu.py").write_text(_TAKEN)
    termination_log = tmp_path / "termination-log"
    termination_log.touch()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "reprise_engine.entrypoints.cli", "serve", "/nowhere", "--host", "127.0.0.1"]
    ended = subprocess.run(
        [*command, "--port", "0", "--device", "npu"],
        env={**os.environ, "TERMINATION_LOG_PATH": str(termination_log), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    words = termination_log.read_text()
    assert words.startswith("DeviceError: NPU 0 cannot be used. The NPU belongs to another container or process. ")
    state, found, message = diagnosed(planned({}), words, exit_code=1)
    assert (state, found) == (State.STALLED, "DeviceUnusable")
    assert "npu-smi info" in message


def test_each_error_that_ends_a_start_has_a_reason_of_its_own() -> None:
    """A new error class of the engine must be taught to the operator."""
    fatal = {
        name
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.RepriseError) and not issubclass(cls, errors.RequestError)
    }
    bases = {"RepriseError", "ModelError"}
    # Not at a start: the server is up, and its container is restarted, or it goes on. A rank that dies at a start is
    # told in its own words, as any crash; where its device or its memory is the cause, the error is one of those.
    later = {"EngineDead", "EngineStopped", "NotFinite", "SlowReader", "RankDied"}
    fetching = {name for name in fatal if issubclass(getattr(errors, name), errors.FetchError)}  # test_fetch_argv.py
    assert fatal - bases - later - fetching == {
        *("ConfigError", "DeviceError", "InsufficientMemory", "OutOfMemory"),
        *("ModelNotFound", "DamagedModel", "UnsupportedModel"),
    }
