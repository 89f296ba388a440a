"""docs/benchmarking.md and docs/evaluation.md show what the commands take, and the task for lm-eval is whole."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from reprise_engine.entrypoints.arguments import build_parser
from reprise_engine.evaluation.equality import TOLERANCES as LOGIT_TOLERANCES
from reprise_engine.evaluation.perplexity import TOLERANCES as PERPLEXITY_TOLERANCES

DOCS = Path(__file__).parents[2] / "docs"
BENCHMARKING, EVALUATION = ((DOCS / name).read_text() for name in ("benchmarking.md", "evaluation.md"))
COMMANDS = re.findall(r"^(?:\$ )?reprise (.+)$", BENCHMARKING + EVALUATION, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command: str) -> None:
    build_parser().parse_args(shlex.split(command.partition("#")[0]))


def test_there_are_such_commands() -> None:
    assert {command.split()[0] for command in COMMANDS} == {"bench", "eval", "serve"}


def test_vllms_flags_are_understood() -> None:
    table = BENCHMARKING.partition("## Names of vLLM's flags")[2].partition("## Other tools")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `--")]
    flags = {flag for row in rows for flag in re.findall(r"--[a-z-]+", row)}
    flags |= {f"--prefix-repetition{end}" for row in rows for end in re.findall(r"`(-[a-z][a-z-]+)`", row)}
    assert len(flags) == 18
    values = {"--dataset-name": "random", "--extra-body": "{}", "--disable-tqdm": None}
    for flag in sorted(flags):
        value = values.get(flag, "1")
        build_parser().parse_args(["bench", flag] if value is None else ["bench", flag, value])


def test_the_tolerances_are_those_of_the_code() -> None:
    text = f"float32 {LOGIT_TOLERANCES['float32']}, bfloat16 {LOGIT_TOLERANCES['bfloat16']}"
    assert text in EVALUATION
    assert f"float16 {LOGIT_TOLERANCES['float16']}" in EVALUATION
    assert f"{PERPLEXITY_TOLERANCES['float32']:.4f} (bfloat16: {PERPLEXITY_TOLERANCES['bfloat16']}" in EVALUATION


def test_the_small_task_has_its_questions_and_shows_none_of_them_as_an_example() -> None:
    task = yaml.safe_load((DOCS / "lm_eval" / "small_facts.yaml").read_text())
    lines = (DOCS.parent / task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
    questions = [json.loads(line) for line in lines]
    examples = task["fewshot_config"]["samples"]
    assert len(questions) == 32
    assert len(examples) == task["num_fewshot"]
    asked = [entry["question"] for entry in [*questions, *examples]]
    assert len(set(asked)) == len(asked)
    assert all(entry.keys() == {"question", "answer"} and entry["answer"] for entry in [*questions, *examples])
