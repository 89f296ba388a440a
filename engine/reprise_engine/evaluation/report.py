"""What was found, as tables for a person and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from reprise_engine.evaluation.equality import MODES, Difference, EqualityResult, Verdict
from reprise_engine.evaluation.perplexity import PerplexityResult
from reprise_engine.evaluation.quantized import Parting, QuantizedPrompt, QuantizedResult
from reprise_engine.request import TokenId


def print_equality(console: Console, result: EqualityResult, *, token_text: Callable[[TokenId], str]) -> None:
    """`token_text` shows a token in the differences."""
    table = Table(title=f"greedy tokens against transformers, {result.dtype}, {result.max_tokens} a prompt")
    table.title_justify = "left"
    table.add_column("prompt")
    table.add_column("tokens", justify="right")
    for mode in MODES:
        table.add_column(f"cache {'off' if mode == 'off' else f'on, {mode}'}")
    table.add_column("cached, warm", justify="right")
    table.add_column("logit error", justify="right")
    for prompt in result.prompts:
        verdicts = {verdict.mode: verdict for verdict in prompt.verdicts}
        table.add_row(
            prompt.name,
            f"{prompt.prompt_tokens:,}",
            *(_word(verdicts[mode], result.tolerance) for mode in MODES),
            f"{verdicts['warm'].cached_tokens:,}",
            f"{max(verdict.max_error for verdict in prompt.verdicts):.2g}",
        )
    console.print(table)
    for prompt in result.prompts:
        for verdict in prompt.verdicts:
            shown = verdict.broken or verdict.first_difference
            if shown is not None:
                where = f"{prompt.name}, {_mode(verdict)}"
                console.print(f"{where}: {_explain(shown, result, token_text)}", highlight=False, markup=False)
    same = sum(prompt.same_in_all_modes for prompt in result.prompts)
    console.print(
        f"{same} of {len(result.prompts)} prompts have the same tokens cold, warm and without the cache. Greatest "
        f"error of a log-probability: {result.max_error:.2g}; tolerance: {result.tolerance:g}.",
        highlight=False,
    )
    console.print("[green]equal[/]" if result.ok else "[red]BROKEN[/]")


def _mode(verdict: Verdict) -> str:
    return "cache off" if verdict.mode == "off" else f"cache on, {verdict.mode}"


def _word(verdict: Verdict, tolerance: float) -> str:
    if verdict.broken is not None:
        return f"[red]BROKEN at {verdict.broken.position}[/]"
    if verdict.max_error > tolerance:
        return "[red]error too large[/]"
    if verdict.first_difference is not None:
        return f"[yellow]near tie at {verdict.first_difference.position}[/]"
    return "equal"


def _explain(difference: Difference, result: EqualityResult, token_text: Callable[[TokenId], str]) -> str:
    said = "more than" if difference.margin > result.tolerance else "within"
    return (
        f"token {difference.position} is {difference.token_id} {token_text(difference.token_id)!r} where transformers "
        f"says {difference.expected} {token_text(difference.expected)!r}; that one leads by {difference.margin:.3g}, "
        f"{said} the tolerance of {result.tolerance:g}; error there {difference.error:.2g}"
    )


def print_quantized(console: Console, result: QuantizedResult) -> None:
    table = Table(title=f"greedy tokens of quantised weights, {result.dtype}, {result.max_tokens} a prompt")
    table.title_justify = "left"
    table.add_column("prompt")
    for column in ("tokens", "as the float model's", "log-probability error", "cached, warm"):
        table.add_column(column, justify="right")
    table.add_column("cache on == off")
    for prompt in result.prompts:
        table.add_row(
            prompt.name,
            f"{prompt.prompt_tokens:,}",
            f"{prompt.agreed} of {prompt.tokens}",
            f"{prompt.max_error:.2g}",
            f"{prompt.cached_tokens:,}",
            _parted(prompt, result.tolerance),
        )
    console.print(table)
    console.print(
        f"{result.agreement:.1%} of the tokens are the likeliest of the float model ({result.float_model}). Judged is "
        f"the cache alone: the same tokens with it and without, but for ties within {result.tolerance:g}.",
        highlight=False,
        markup=False,
    )
    console.print("[green]equal[/]" if result.ok else "[red]BROKEN[/]")


def _parted(prompt: QuantizedPrompt, tolerance: float) -> str:
    if not prompt.partings:
        return "equal"

    def place(parting: Parting) -> str:
        return f"{parting.mode} at {parting.position}"

    broken = [place(parting) for parting in prompt.partings if parting.broken(tolerance)]
    if broken:
        return f"[red]BROKEN: {', '.join(broken)}[/]"
    return f"[yellow]near tie: {', '.join(map(place, prompt.partings))}[/]"


def print_perplexity(console: Console, result: PerplexityResult) -> None:
    table = Table(
        title=f"perplexity, {result.dtype}, {len(result.scores[0].logprobs):,} tokens scored, windows of "
        f"{result.context} every {result.stride}"
    )
    table.title_justify = "left"
    table.add_column("")
    for column in ("perplexity", "cached tokens", "greatest error of a token", "same likeliest token"):
        table.add_column(column, justify="right")
    for score in result.scores:
        table.add_row(
            score.way,
            f"{score.perplexity:.6g}",
            f"{score.cached_tokens:,}",
            f"{result.max_error(score):.2g}",
            f"{result.agreement(score):.1%}",
        )
    console.print(table)
    if result.float_model is not None:
        console.print(
            f"Quantised, the perplexity is {result.increase:+.2%} from the float model's ({result.float_model}); the "
            f"likeliest token is the same at {result.agreement(result.scores[0]):.1%} of the positions. Judged is the "
            "cache alone:",
            highlight=False,
            markup=False,
        )
    compared = "They differ" if result.float_model is None else "With it and without, perplexities differ"
    console.print(
        f"{compared} by {result.spread:.2g} of their value at most; tolerance: {result.tolerance:g}.", highlight=False
    )
    console.print("[green]equal[/]" if result.ok else "[red]BROKEN[/]")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
