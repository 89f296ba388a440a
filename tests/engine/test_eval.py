"""`reprise eval`: equal where the engine is right, and it finds what is planted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from reprise_engine.entrypoints import cli, evaluate
from reprise_engine.entrypoints.arguments import build_parser
from reprise_engine.errors import ConfigError
from reprise_engine.evaluation.cases import built_in_cases, read_cases
from reprise_engine.evaluation.engine import Generated
from reprise_engine.evaluation.equality import Prompted, judge
from reprise_engine.evaluation.perplexity import Window, make_windows
from reprise_engine.loop import Runner
from reprise_engine.request import TokenLogprobs
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.step import Step, StepResult
from reprise_engine.text import load_tokenizer
from tests.support.tiny_models import tiny_model_path

MODEL = str(tiny_model_path("qwen3"))
TEXT = "A prefix cache keeps the keys and values of tokens it has seen. The quick brown fox jumps. " * 4


class ForgetsCopies:
    """A runner that does not copy a block before it is written on: what diverges inside a block reads other keys."""

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner

    def run(self, step: Step) -> StepResult:
        return self._inner.run(replace(step, copies=()))


# --- the command


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_is_equal_to_transformers(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert cli.main(["eval", "equality", MODEL, "--dtype", dtype, "--max-tokens", "8", "--json", str(file)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("equal")
    content = json.loads(file.read_text())
    assert (content["ok"], content["dtype"], content["evaluation"]) == (True, dtype, "equality")
    assert len(content["prompts"]) == 11
    for prompt in content["prompts"]:
        cached = {verdict["mode"]: verdict["cached_tokens"] for verdict in prompt["verdicts"]}
        assert cached["warm"] == prompt["prompt_tokens"] - 1
        assert cached["off"] == 0
    assert content["max_error"] <= content["tolerance"]


@pytest.mark.parametrize("spoil", [False, True], ids=["whole", "spoilt"])
def test_it_finds_a_runner_that_forgets_to_copy(
    spoil: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrap(runner: ModelRunner) -> Runner:
        return ForgetsCopies(runner) if spoil else runner

    file = tmp_path / "out.json"
    parsed = build_parser().parse_args(["eval", "equality", MODEL, "--max-tokens", "8", "--json", str(file)])
    code = evaluate.exit_code(parsed, lambda parsed: evaluate.equality(parsed, wrap_runner=wrap))
    assert code == int(spoil)
    content = json.loads(file.read_text())
    broken = {
        verdict["mode"]
        for prompt in content["prompts"]
        for verdict in prompt["verdicts"]
        if verdict["broken"] or verdict["max_error"] > content["tolerance"]
    }
    assert ("warm" in broken) is spoil
    assert "off" not in broken, "without a cache nothing is copied"
    assert ("BROKEN" in capsys.readouterr().out) is spoil


def test_perplexity_is_the_same_three_ways_and_what_transformers_own_loss_says(tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(TEXT)
    arguments = ["--text", str(text), "--context", "64", "--stride", "24", "--json", str(file)]
    assert cli.main(["eval", "perplexity", MODEL, *arguments]) == 0
    content = json.loads(file.read_text())
    on, off, reference = content["scores"]
    tokens = load_tokenizer(MODEL).encode(TEXT)
    assert len(on["logprobs"]) == len(off["logprobs"]) == len(tokens) - 1
    assert content["spread"] < 1e-4
    # Of a window but the first, its context is cached, less the token whose logits are needed: 40 - 1.
    windows = make_windows(len(tokens), context=64, stride=24)
    assert on["cached_tokens"] == sum(window.scored_from - 1 - window.start for window in windows)
    assert off["cached_tokens"] == 0
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    total = 0.0
    for window in windows:
        ids = torch.tensor([tokens[window.start : window.end]])
        labels = ids.clone()
        labels[:, : window.scored_from - window.start] = -100
        with torch.inference_mode():
            total += model(ids, labels=labels).loss.item() * (window.end - window.scored_from)
    assert reference["perplexity"] == pytest.approx(math.exp(total / (len(tokens) - 1)), rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["equality", "/no/such/model"], 1, "/no/such/model"),
        (["equality", MODEL, "--prompts", "/no/such/file"], 2, "cannot read /no/such/file"),
        (["equality", MODEL, "--max-tokens", "0"], 2, "--max-tokens is 0"),
        (["equality", MODEL, "--tolerance", "-1"], 2, "--tolerance is -1.0"),
        (["perplexity", MODEL, "--text", "/no/such/file"], 2, "cannot read /no/such/file"),
        (["perplexity", MODEL, "--text", "/dev/null"], 2, "has 0 tokens"),
        (["perplexity", MODEL, "--text", "/dev/null", "--stride", "600"], 2, "--stride is 600"),
    ],
)
def test_what_cannot_be_evaluated_is_one_clear_line(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("reprise eval: error: ")
    assert words in error


# --- the parts


def test_a_json_that_cannot_be_written_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parsed = build_parser().parse_args(["eval", "equality", MODEL, "--json", str(tmp_path)])
    assert evaluate.exit_code(parsed, lambda _: (True, {})) == 2
    assert capsys.readouterr().err == (
        f"reprise eval: error: --json is {tmp_path}, which cannot be written: Is a directory.\n"
    )


def test_prompts_from_files(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(MODEL)
    lines, objects = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_text("one prompt\n\nanother\n")
    assert [case.name for case in read_cases(lines, tokenizer)] == ["line 1", "line 3"]
    entries = [{"prompt": [5, 6]}, {"turns": ["a", "b"]}, {"messages": [{"role": "user", "content": "hi"}]}]
    objects.write_text("\n".join(map(json.dumps, entries)))
    ids, conversation, chat = read_cases(objects, tokenizer)
    assert ids.turns == ((5, 6),)
    assert conversation.turns == (tokenizer.encode("a"), tokenizer.encode("b"))
    assert conversation.longest(10) == len(conversation.turns[0]) + len(conversation.turns[1]) + 20
    assert "hi" in tokenizer.decode(chat.turns[0])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no prompts"),
        ("{", "line 1 of"),
        ('{"text": "x"}', "one of prompt, messages, turns"),
        ('{"prompt": "x", "turns": ["y"]}', "and nothing else"),
        ('{"turns": "x"}', "turns must be a list of texts"),
        ('{"prompt": [1.5]}', "a text or a list of token ids"),
        ('{"prompt": ""}', "a prompt without a token"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_cases(file, load_tokenizer(MODEL))


def test_the_built_in_prompts_share_a_prefix_and_hold_conversations() -> None:
    cases = built_in_cases(load_tokenizer(MODEL))
    assert [len(case.turns) for case in cases] == [1, 1, 1, 1, 3, 3, 1]
    assert len({case.turns[0][:50] for case in cases[:6]}) == 1


class FixedReference:
    """Logits by hand; asked for the last positions of a sequence."""

    def __init__(self, logits: Sequence[Sequence[float]]) -> None:
        self._logits = torch.tensor(logits)
        self.asked: list[tuple[int, ...]] = []

    def logits(self, token_ids: Sequence[int], *, last: int) -> torch.Tensor:
        self.asked.append(tuple(token_ids))
        return self._logits[-last:]


def generated(token_ids: tuple[int, ...], logits: torch.Tensor, *, error: float = 0.0) -> Generated:
    logprobs = logits.log_softmax(-1)
    entries = tuple(
        TokenLogprobs(token, 0.0, 1, ((token, float(logprobs[position, token]) + error),))
        for position, token in enumerate(token_ids)
    )
    return Generated(token_ids, entries, 0)


LOGITS = [[3.0, 0.0, 0.0], [0.0, 2.0, 1.9], [0.0, 0.0, 5.0]]


@pytest.mark.parametrize(
    ("token_ids", "first", "broken"),
    [
        ((0, 1, 2), None, None),
        ((0, 2, 2), 1, None),  # a lead of 0.1 decides nothing within 0.2
        ((1, 1, 2), 0, 0),
        ((0, 2, 1), 1, 2),  # the near tie comes first, the real one behind it
    ],
)
def test_a_difference_counts_where_the_reference_is_sure(
    token_ids: tuple[int, ...], first: int | None, broken: int | None
) -> None:
    reference = FixedReference(LOGITS)
    answer = generated(token_ids, torch.tensor(LOGITS))
    result = judge(Prompted("p", 0, (7, 8)), [("cold", answer), ("off", answer)], reference, tolerance=0.2)
    assert reference.asked == [(7, 8, *token_ids[:-1])], "one pass for one answer"
    for verdict in result.verdicts:
        assert (verdict.first_difference.position if verdict.first_difference else None) == first
        assert (verdict.broken.position if verdict.broken else None) == broken
        assert verdict.ok(0.2) is (broken is None)
    assert result.same_in_all_modes


def test_an_error_above_the_tolerance_is_broken_even_with_the_right_tokens() -> None:
    answer = generated((0, 1, 2), torch.tensor(LOGITS), error=0.3)
    [verdict] = judge(Prompted("p", 0, (7,)), [("warm", answer)], FixedReference(LOGITS), tolerance=0.2).verdicts
    assert verdict.broken is None
    assert verdict.max_error == pytest.approx(0.3, abs=1e-6)
    assert not verdict.ok(0.2)


@pytest.mark.parametrize(
    ("tokens", "context", "stride", "windows"),
    [
        (5, 8, 4, [Window(0, 1, 5)]),
        (10, 4, 4, [Window(0, 1, 4), Window(4, 4, 8), Window(8, 8, 10)]),
        (10, 6, 2, [Window(0, 1, 6), Window(2, 6, 8), Window(4, 8, 10)]),
        (2, 1, 1, [Window(1, 1, 2)]),
    ],
)
def test_windows(tokens: int, context: int, stride: int, windows: list[Window]) -> None:
    found = make_windows(tokens, context=context, stride=stride)
    assert found == windows
    assert [position for window in found for position in range(window.scored_from, window.end)] == [*range(1, tokens)]
