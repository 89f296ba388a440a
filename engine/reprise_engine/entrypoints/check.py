"""`reprise check`: would `reprise serve` start with these arguments? No weights are loaded and no NPU is needed.

The operator runs it in the new image before it takes the last serving pod for a rollout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from reprise_engine.entrypoints.arguments import server_options
from reprise_engine.errors import DamagedModel, ModelError, RepriseError
from reprise_engine.models.files import ModelFiles, find_weights
from reprise_engine.npu_environment import hide_torch_npu
from reprise_engine.server import logs
from reprise_engine.server.defaults import load_defaults
from reprise_engine.server.options import ServerOptions
from reprise_engine.text import load_tokenizer

EXIT_OK = 0
EXIT_WRONG = 2

_WHOLE = {
    "safetensors": ("model.safetensors", "*.safetensors.index.json"),
    "bin": ("pytorch_model.bin", "*.bin.index.json"),
}


def main(parsed: argparse.Namespace) -> int:
    """0 and a line of what was found, or 2 and a line of what is wrong, on stderr and for the kubelet."""
    try:
        options = server_options(parsed)
        found = "the arguments are valid" if parsed.arguments_only else check_model(options)
    except RepriseError as error:
        logs.last_words(f"{type(error).__name__}: {error}")
        print(f"reprise check: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_WRONG
    print(f"reprise check: {found}")
    return EXIT_OK


def check_model(options: ServerOptions) -> str:
    """Reads what describes the model: files, configuration, tokenizer, chat template, sampling defaults.

    Returns a description. Raises ConfigError or ModelError as the server would.
    """
    hide_torch_npu()  # no NPU is needed to judge a model
    # Only here: reading a configuration imports transformers, and flags are to be judged without it.
    from reprise_engine.attention.npu_limits import check_some_chip
    from reprise_engine.models.quantization import read_quantization
    from reprise_engine.models.spec import read_spec
    from reprise_engine.parallel.shard import check_size, rank_spec

    model = options.engine.model
    files = find_weights(model.model, revision=model.revision)
    plan = read_quantization(files, requested=model.quantization)
    spec = read_spec(files, quantized=plan is not None)
    length = spec.choose_max_model_len(model.max_model_len)
    check_size(spec, options.engine.tensor_parallel_size)
    if options.engine.device == "npu":
        seen = rank_spec(spec, options.engine.tensor_parallel_size)  # by the operators
        check_some_chip(
            num_heads=seen.num_heads,
            num_kv_heads=seen.num_kv_heads,
            head_dim=seen.head_dim,
            dtype=model.dtype,
            block_size=options.engine.cache.block_size,
            max_num_seqs=options.engine.scheduler.max_num_seqs,
        )
    _check_shards(files)
    try:
        load_tokenizer(
            model.model, tokenizer=model.tokenizer, revision=model.revision, chat_template=options.chat_template
        )
    except RepriseError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the tokenizer of {model.model} cannot be read: {error!r}") from error
    load_defaults(
        model.model,
        source=options.generation_config,
        revision=model.revision,
        override=options.override_generation_config,
    )
    return f"{spec.architecture}, {spec.num_layers} layers, context {length} tokens, {len(files.weight_paths())} files"


def _check_shards(files: ModelFiles) -> None:
    """A copy that broke off lacks files that its index names, or has empty ones. Raises DamagedModel."""
    named = _named(files)
    missing = [name for name in named if not (files.folder / name).is_file()]
    empty = [name for name in named if name not in missing and (files.folder / name).stat().st_size == 0]
    for what, names in (("lacks", missing), ("has empty", empty)):
        if names:
            raise DamagedModel(f"{files.folder} {what} {_some(names)}: the copy of the model is not complete.")


def _named(files: ModelFiles) -> list[str]:
    """The files that hold the weights: the one there is, else those of the index."""
    if files.gguf_file is not None:
        return [files.gguf_file]
    single, index = _WHOLE[files.weights]
    if (files.folder / single).is_file():
        return [single]
    named: set[str] = set()
    for path in files.folder.glob(index):
        weight_map = (files.read_json(path.name) or {}).get("weight_map")
        named |= {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
    return sorted(named)


def _some(names: Sequence[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
