"""Plain `transformers`: the model's own definition, eager attention, no cache, no paging, no kernels of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from reprise_engine.models.files import find_weights
from reprise_engine.models.quiet import without_progress_bars
from reprise_engine.request import TokenId


class Reference:
    """Weights rounded to `dtype` as the engine has them, arithmetic in float32: what exact arithmetic would come to."""

    def __init__(self, model: str, *, dtype: str, revision: str | None = None) -> None:
        files = find_weights(model, revision=revision)
        options: dict[str, Any] = {
            "dtype": getattr(torch, dtype),
            "attn_implementation": "eager",
            "local_files_only": True,
            "trust_remote_code": False,
        }
        if files.gguf_file is not None:
            from transformers import GgufConfig

            options |= {"gguf_file": files.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
        with without_progress_bars():
            module: Any = AutoModelForCausalLM.from_pretrained(files.folder, **options)
        assert isinstance(module, PreTrainedModel)
        self._module = module.to(torch.float32).eval()  # type: ignore[arg-type]  # typed for transformers' own mixin

    @property
    def vocab_size(self) -> int:
        return int(self._module.config.vocab_size)

    def logits(self, token_ids: Sequence[TokenId], *, last: int) -> torch.Tensor:
        """(last, V), float32: of the last so many positions of one sequence, computed in one pass."""
        with torch.inference_mode():
            output: Any = self._module(torch.tensor([list(token_ids)]), use_cache=False, logits_to_keep=last)
        logits: torch.Tensor = output.logits[0]
        return logits
