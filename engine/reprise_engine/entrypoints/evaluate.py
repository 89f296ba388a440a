"""`reprise eval`: flags, and what they mean. The evaluation itself is imported when it is asked for: it needs torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprise_engine.errors import ConfigError, RepriseError
from reprise_engine.npu_environment import is_torch_npu_installed
from reprise_engine.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from reprise_engine.evaluation.engine import EngineOptions, RunnerWrapper
    from reprise_engine.evaluation.reference import Reference

EXIT_BROKEN, EXIT_USAGE = 1, 2


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="evaluation", required=True, metavar="WHAT")
    equality = kinds.add_parser("equality", help="cache on (cold, warm) == cache off == transformers, token by token")
    _add_common(equality)
    equality.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt a line; *.jsonl: objects with prompt, messages or turns (built-in ones)",
    )
    equality.add_argument("--max-tokens", type=int, default=32, metavar="TOKENS", help="to generate for each (32)")
    equality.add_argument(
        "--tolerance", type=float, metavar="LOGITS", help="(by dtype: float32 0.001, bfloat16 0.25, float16 0.05)"
    )
    perplexity = kinds.add_parser("perplexity", help="of a text, with the cache, without, and of transformers")
    _add_common(perplexity)
    perplexity.add_argument("--text", type=Path, required=True, metavar="FILE")
    perplexity.add_argument("--context", type=int, default=512, metavar="TOKENS", help="of a window (512)")
    perplexity.add_argument("--stride", type=int, default=256, metavar="TOKENS", help="from window to window (256)")
    perplexity.add_argument("--limit", type=int, metavar="TOKENS", help="of the text (all)")
    perplexity.add_argument(
        "--tolerance", type=float, metavar="SHARE", help="(by dtype: float32 0.0001, bfloat16 0.02, float16 0.01)"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, or name in the local hub cache")
    parser.add_argument("--tokenizer", help="where the tokenizer is, if not with the model")
    parser.add_argument("--revision", help="revision of a model named in the hub cache")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="(auto)")
    parser.add_argument("--quantization", "-q", metavar="METHOD", help="as of `reprise serve`; with --reference-model")
    parser.add_argument(
        "--reference-model", metavar="MODEL", help="the float model that a quantised one was made from: what it cost"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "npu"], default="auto", help="(auto)")
    parser.add_argument("--block-size", type=int, default=None, metavar="TOKENS")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=None, metavar="TOKENS", help="a step; small ones cut prompts"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was found")
    parser.add_argument("--disable-tqdm", "--no-progress", action="store_true", help="no progress bar")


def main(parsed: argparse.Namespace) -> int:
    """0 where all is equal, 1 where it is broken or a model cannot be loaded, 2 for a wrong flag or file."""
    return exit_code(parsed, equality if parsed.evaluation == "equality" else perplexity)


def exit_code(
    parsed: argparse.Namespace, evaluation: Callable[[argparse.Namespace], tuple[bool, dict[str, Any]]]
) -> int:
    """Of an evaluation, which is run here; what it found is written where --json says."""
    try:
        if parsed.json is not None and not parsed.json.absolute().parent.is_dir():
            raise ConfigError(f"--json is {parsed.json}, whose folder does not exist.")
        if parsed.tolerance is not None and not parsed.tolerance >= 0:
            raise ConfigError(f"--tolerance is {parsed.tolerance}; it must be at least 0.")
        if is_torch_npu_installed():
            from reprise_engine.device import settle_torch_npu

            settle_torch_npu(parsed.device)
        ok, content = evaluation(parsed)
        if parsed.json is not None:
            from reprise_engine.evaluation.report import write_json

            try:
                write_json(parsed.json, {"evaluation": parsed.evaluation, "model": parsed.model} | content)
            except OSError as error:
                raise ConfigError(f"--json is {parsed.json}, which cannot be written: {error.strerror}.") from error
    except RepriseError as error:
        print(f"reprise eval: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_BROKEN
    except KeyboardInterrupt:
        print("reprise eval: interrupted", file=sys.stderr)
        return 130
    return 0 if ok else EXIT_BROKEN


def _options(parsed: argparse.Namespace) -> EngineOptions:
    from reprise_engine.evaluation.engine import EngineOptions
    from reprise_engine.models.files import find_weights

    if parsed.quantization is not None and parsed.reference_model is None:
        raise ConfigError(
            f"--quantization is {parsed.quantization}, and transformers does not read such weights; give "
            "--reference-model, the float model to compare with."
        )
    if parsed.quantization is None and parsed.reference_model is not None:
        raise ConfigError(
            f"--reference-model is {parsed.reference_model}, but the model is evaluated as a float one, whose "
            "reference is itself; give --quantization ascend, or leave --reference-model out."
        )
    if parsed.reference_model is not None:
        find_weights(parsed.reference_model)  # before the engine is loaded
    return EngineOptions(
        model=parsed.model,
        revision=parsed.revision,
        dtype=parsed.dtype,
        quantization=parsed.quantization,
        device=parsed.device,
        block_size=parsed.block_size,
        max_num_batched_tokens=parsed.max_num_batched_tokens,
    )


def _reference(parsed: argparse.Namespace, *, dtype: str, vocab_size: int) -> Reference:
    """Of the same weights, or of the float model they were made from. Raises ConfigError for another model."""
    from reprise_engine.evaluation.reference import Reference

    if parsed.reference_model is None:
        return Reference(parsed.model, dtype=dtype, revision=parsed.revision)
    reference = Reference(parsed.reference_model, dtype=dtype)
    if reference.vocab_size != vocab_size:
        raise ConfigError(
            f"--reference-model is {parsed.reference_model}, whose vocabulary has {reference.vocab_size} entries, and "
            f"{parsed.model} has {vocab_size}: it is another model."
        )
    return reference


def equality(
    parsed: argparse.Namespace, *, wrap_runner: RunnerWrapper = lambda runner: runner
) -> tuple[bool, dict[str, Any]]:
    """Whether all is equal, and the content of the JSON. `wrap_runner` spoils the engine, for a test of the test."""
    from reprise_engine.evaluation import cases, report
    from reprise_engine.evaluation.engine import InProcessEngine, engine_config
    from reprise_engine.evaluation.equality import TOLERANCES, EqualityResult, check, generate_all
    from reprise_engine.evaluation.quantized import QuantizedResult, compare
    from reprise_engine.text import load_tokenizer

    _positive(parsed, "max_tokens")
    tokenizer = load_tokenizer(parsed.model, tokenizer=parsed.tokenizer, revision=parsed.revision)
    asked = cases.built_in_cases(tokenizer) if parsed.prompts is None else cases.read_cases(parsed.prompts, tokenizer)
    options = _options(parsed)
    lengths = [case.longest(parsed.max_tokens) for case in asked]
    dtype, vocab_size = "", 0

    def open_engine(caching: bool) -> InProcessEngine:
        nonlocal dtype, vocab_size
        engine = InProcessEngine(engine_config(options, caching=caching, lengths=lengths), wrap_runner=wrap_runner)
        dtype, vocab_size = engine.resolved.dtype, engine.resolved.vocab_size
        return engine

    with _progress(shown=not parsed.disable_tqdm) as progress:
        answers = generate_all(asked, open_engine=open_engine, max_tokens=parsed.max_tokens, progress=progress)
        reference = _reference(parsed, dtype=dtype, vocab_size=vocab_size)
        tolerance = TOLERANCES[dtype] if parsed.tolerance is None else parsed.tolerance
        result: EqualityResult | QuantizedResult
        if parsed.reference_model is None:
            result = check(
                answers,
                reference=reference,
                dtype=dtype,
                max_tokens=parsed.max_tokens,
                tolerance=tolerance,
                progress=progress,
            )
        else:
            result = compare(
                answers,
                reference=reference,
                float_model=parsed.reference_model,
                dtype=dtype,
                max_tokens=parsed.max_tokens,
                tolerance=tolerance,
                progress=progress,
            )
    if isinstance(result, EqualityResult):
        report.print_equality(_console(), result, token_text=tokenizer.token_text)
    else:
        report.print_quantized(_console(), result)
    return result.ok, result.as_json() | {"versions": _versions()}


def perplexity(parsed: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    """Whether all three agree, and the content of the JSON."""
    from reprise_engine.evaluation import report
    from reprise_engine.evaluation.engine import InProcessEngine, engine_config
    from reprise_engine.evaluation.perplexity import (
        SCORED_TOKENS_A_STEP,
        TOLERANCES,
        PerplexityResult,
        Score,
        ScoringEngine,
        TokenLogits,
        make_windows,
        score_with_engine,
        score_with_reference,
    )
    from reprise_engine.loop import Runner
    from reprise_engine.text import load_tokenizer

    _positive(parsed, "context", "stride", "limit")
    if parsed.stride > parsed.context:
        raise ConfigError(f"--stride is {parsed.stride}; it must be at most --context ({parsed.context}).")
    tokenizer = load_tokenizer(parsed.model, tokenizer=parsed.tokenizer, revision=parsed.revision)
    token_ids = tokenizer.encode(_read_text(parsed.text))[: parsed.limit]
    if len(token_ids) < 2:
        raise ConfigError(f"--text: {parsed.text} has {len(token_ids)} tokens; at least 2 are needed.")
    windows = make_windows(len(token_ids), context=parsed.context, stride=parsed.stride)
    options = _options(parsed)
    if options.max_num_batched_tokens is None:
        options = replace(options, max_num_batched_tokens=SCORED_TOKENS_A_STEP)
    # A window, the context before it, and the token that each of them generates.
    lengths = [min(parsed.context, len(token_ids)) + 1] * 2
    dtype, vocab_size = "", 0

    def open_engine(caching: bool) -> ScoringEngine:
        nonlocal dtype, vocab_size

        def build(wrap: Callable[[TokenLogits], Runner]) -> InProcessEngine:
            return InProcessEngine(engine_config(options, caching=caching, lengths=lengths), wrap_runner=wrap)

        engine = ScoringEngine(build)
        dtype, vocab_size = engine.dtype, engine.vocab_size
        return engine

    with _progress(shown=not parsed.disable_tqdm) as progress:
        scores: list[Score] = []
        for caching, way in ((True, "cache on"), (False, "cache off")):
            progress(way, 0, len(windows))
            engine = open_engine(caching)
            scores.append(score_with_engine(engine, token_ids, windows, way=way, progress=progress))
            del engine  # its weights, before the next ones are loaded
        reference = _reference(parsed, dtype=dtype, vocab_size=vocab_size)
        way = "transformers" if parsed.reference_model is None else "float model"
        scores.append(score_with_reference(reference, token_ids, windows, way=way, progress=progress))
    result = PerplexityResult(
        dtype=dtype,
        tolerance=TOLERANCES[dtype] if parsed.tolerance is None else parsed.tolerance,
        num_tokens=len(token_ids),
        context=parsed.context,
        stride=parsed.stride,
        scores=tuple(scores),
        float_model=parsed.reference_model,
    )
    report.print_perplexity(_console(), result)
    return result.ok, result.as_json() | {"versions": _versions()}


def _positive(parsed: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(parsed, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: cannot read {path}: {error}") from error


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"reprise": __version__} | {name: version(name) for name in ("torch", "transformers")}


def _console() -> Console:
    from rich.console import Console

    # A table that is read from a file or a pipe must not be cut at 80 columns.
    return Console() if sys.stdout.isatty() else Console(width=140)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal's stderr; told (stage, done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(file=sys.stderr),
        disable=not shown or not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("", total=None)

        def tell(stage: str, done: int, total: int) -> None:
            progress.update(task, description=stage, completed=done, total=total)

        yield tell
