"""The operator's check runs in the engine it is for: its arguments parse, and what it says is understood."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reprise_engine.entrypoints.arguments import build_parser, server_options
from reprise_operator.checks import CheckState, outcome_of
from reprise_operator.children.check_job import check_args
from reprise_operator.children.vllm_check import SCRIPT
from tests.support.factories import failure, planned, pod


@pytest.mark.parametrize("spec", [{}, {"accelerator": {"profile": "cpu"}}, {"model": {"maxModelLen": 4096}}])
@pytest.mark.parametrize("fetched", [False, True])
def test_the_arguments_of_a_check_are_those_of_the_pod(spec: dict[str, Any], fetched: bool) -> None:
    of = planned(spec)
    args = of.workload["spec"]["template"]["spec"]["containers"][0]["args"]
    parser = build_parser()
    checked = parser.parse_args(check_args(of.service, args, fetched=fetched))
    assert checked.command == "check"
    assert checked.arguments_only is fetched
    assert server_options(checked, {}) == server_options(parser.parse_args(args), {})


def test_an_engine_without_the_command_is_told_from_one_that_refuses() -> None:
    """As its parser puts it: the words that checks.py knows."""
    done = subprocess.run(
        [sys.executable, "-m", "reprise_engine.entrypoints.cli", "chekc"], capture_output=True, text=True, check=False
    )
    words = done.stderr.replace("'chekc'", "'check'")
    body = {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    seen = [pod("c", ready=False, failures=[failure("Error", words=words, code=done.returncode, restarts=3)])]
    assert outcome_of(body, seen).state is CheckState.PASSED


def vllm(*words: str, modules: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, *words]
    environment = {} if modules is None else {"PYTHONPATH": str(modules)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    return folder


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """vLLM's two modules as the program imports them, with one flag."""
    folder = tmp_path / "modules"
    for package in ("vllm", "vllm/utils", "vllm/entrypoints", "vllm/entrypoints/openai"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    (folder / "vllm/utils/argparse_utils.py").write_text(
        "from argparse import ArgumentParser as FlexibleArgumentParser\n"
    )
    (folder / "vllm/entrypoints/openai/cli_args.py").write_text(
        "def make_arg_parser(parser):\n"
        "    parser.add_argument('model_tag', nargs='?')\n"
        "    parser.add_argument('--port', type=int)\n"
        "    return parser\n"
    )
    return folder


def test_vllms_parser_judges_the_flags(model: Path, modules: Path) -> None:
    assert vllm(str(model), "--port", "8000", modules=modules).returncode == 0
    wrong = vllm(str(model), "--no-such-flag", modules=modules)
    assert wrong.returncode == 2
    assert "--no-such-flag" in wrong.stderr


def test_a_vllm_that_wants_a_device_to_be_imported_is_passed_with_a_word(model: Path, modules: Path) -> None:
    (modules / "vllm/__init__.py").write_text("raise RuntimeError('libascend_hal.so is not there')\n")
    done = vllm(str(model), "--no-such-flag", modules=modules)
    assert done.returncode == 0
    assert "the flags were not judged" in done.stdout
    assert "libascend_hal.so" in done.stdout


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "ModelNotFound"), ("{cut o", "DamagedModel"), ("{}", "DamagedModel"), ("[]", "DamagedModel")],
)
def test_vllms_model_is_looked_at(model: Path, text: str | None, reason: str) -> None:
    (model / "config.json").unlink()
    if text is not None:
        (model / "config.json").write_text(text)
    done = vllm(str(model))
    assert done.returncode == 2
    assert reason in done.stderr
    assert vllm("--arguments-only", str(model)).returncode == 0
