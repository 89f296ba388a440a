"""`reprise eval` of quantised weights: what they cost against the float model, and whether the cache adds to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reprise_engine.entrypoints import cli, evaluate
from reprise_engine.entrypoints.arguments import build_parser
from reprise_engine.evaluation.engine import Generated
from reprise_engine.evaluation.equality import Answers, Prompted
from reprise_engine.evaluation.quantized import compare
from reprise_engine.loop import Runner
from reprise_engine.request import TokenLogprobs
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.step import Step, StepResult
from reprise_engine.text import load_tokenizer
from tests.support.tiny_models import tiny_model_path
from tests.support.w8a8 import quantize_model

FLOAT = str(tiny_model_path("qwen3"))
TEXT = "A prefix cache keeps the keys and values of tokens it has seen. The quick brown fox jumps. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("model") / "quantized"
    return str(quantize_model(tiny_model_path("qwen3"), target, calibration=[list(load_tokenizer(FLOAT).encode(TEXT))]))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """They part inside a block of the cache."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("".join(f"{TEXT[:150]}{end}\n" for end in ("The fox.", "A cache.", "Paris.")))
    return str(file)


def test_tokens_that_are_the_float_model_s(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    arguments = ["--quantization", "ascend", "--reference-model", FLOAT, "--max-tokens", "16", "--json", str(file)]
    assert cli.main(["eval", "equality", model, "--prompts", prompts, *arguments]) == 0
    content = json.loads(file.read_text())
    assert (content["ok"], content["float_model"], len(content["prompts"])) == (True, FLOAT, 3)
    agreed = sum(prompt["agreed"] for prompt in content["prompts"])
    assert content["agreement"] == agreed / (3 * 16)
    assert 0.5 < content["agreement"] < 1, "quantised to eight bits, it is near and not the same"
    assert all(prompt["max_error"] > 1e-3 for prompt in content["prompts"])
    assert all(prompt["partings"] == [] for prompt in content["prompts"])
    told = capsys.readouterr().out
    assert f"{content['agreement']:.1%} of the tokens" in told
    assert told.rstrip().endswith("equal")


class ForgetsCopies:
    """As in test_eval.py: what diverges inside a block reads other keys."""

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner

    def run(self, step: Step) -> StepResult:
        return self._inner.run(replace(step, copies=()))


def test_a_cache_that_changes_the_tokens_is_broken(
    model: str, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrap(runner: ModelRunner) -> Runner:
        return ForgetsCopies(runner)

    arguments = ["eval", "equality", model, "--quantization", "ascend", "--reference-model", FLOAT]
    parsed = build_parser().parse_args([*arguments, "--prompts", prompts, "--max-tokens", "8"])
    assert evaluate.exit_code(parsed, lambda parsed: evaluate.equality(parsed, wrap_runner=wrap)) == 1
    assert "BROKEN" in capsys.readouterr().out


def test_perplexity_beside_the_float_model_s(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(TEXT)
    common = ["--text", str(text), "--context", "64", "--stride", "24", "--json", str(file)]
    assert cli.main(["eval", "perplexity", FLOAT, *common]) == 0
    of_float = json.loads(file.read_text())
    quantized = ["--quantization", "ascend", "--reference-model", FLOAT]
    assert cli.main(["eval", "perplexity", model, *quantized, *common]) == 0
    content = json.loads(file.read_text())
    on, off, reference = content["scores"]
    assert reference["way"] == "float model"
    assert reference["perplexity"] == of_float["scores"][-1]["perplexity"]
    assert on["logprobs"] == pytest.approx(off["logprobs"], abs=1e-3)
    assert content["spread"] < content["tolerance"], "of the two with the cache and without"
    assert content["increase"] == pytest.approx(on["perplexity"] / reference["perplexity"] - 1)
    assert abs(content["increase"]) > content["tolerance"], "quantisation shows"
    same = sum(ours == theirs for ours, theirs in zip(on["likeliest"], reference["likeliest"], strict=True))
    assert on["agreement"] == same / len(on["likeliest"])
    assert 0.5 < on["agreement"] < 1
    assert f"{content['increase']:+.2%} from the float model's" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quantization", "ascend"], "give --reference-model"),
        (["--reference-model", FLOAT], "give --quantization ascend"),
        (["--quantization", "awq", "--reference-model", FLOAT], "--quantization is 'awq'; it must be ascend"),
        (["--quantization", "ascend", "--reference-model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_what_does_not_go_together_is_one_clear_line(
    arguments: list[str], words: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "equality", model, *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_another_tokenizer_s_model_is_no_reference(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    other = tmp_path / "other"
    Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8)).save_pretrained(other)  # fmt: skip
    arguments = ["--quantization", "ascend", "--reference-model", str(other), "--max-tokens", "1"]
    assert cli.main(["eval", "equality", model, "--prompts", prompts, *arguments]) == 2
    assert "whose vocabulary has 8 entries" in capsys.readouterr().err


# --- the judgement


class Sure:
    """Says token 1 everywhere."""

    def logits(self, token_ids: object, *, last: int) -> torch.Tensor:
        return torch.tensor([[0.0, 4.0, 0.0]]).repeat(last, 1)


def generated(tokens: tuple[int, ...], lead: float) -> Generated:
    told = TokenLogprobs(token_id=1, logprob=-0.1, rank=1, top=((1, -0.1), (2, -0.1 - lead)))
    return Generated(tokens, (told,) * len(tokens), 0)


@pytest.mark.parametrize(
    ("warm", "lead", "ok"), [((1, 1), 9.0, True), ((1, 2), 0.04, True), ((1, 2), 0.06, False), ((1, 0), 0.0, False)]
)
def test_only_a_tie_may_part_the_cache_s_tokens(warm: tuple[int, ...], lead: float, ok: bool) -> None:
    cold = generated((1, 1), lead)
    answers = Answers((Prompted("p", 0, (1, 2)),), {"cold": [cold], "warm": [generated(warm, lead)], "off": [cold]})
    result = compare(
        answers,
        reference=Sure(),
        float_model="f",
        dtype="float32",
        max_tokens=2,
        tolerance=0.05,
        progress=lambda _stage, _done, _total: None,
    )
    assert result.ok is ok
    assert result.agreement == 1.0
