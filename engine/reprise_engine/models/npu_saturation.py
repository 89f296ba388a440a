"""Whether hidden states are beyond float16 on a 310P, which says nothing of it.

Other NPUs compute infinity, which ends the request (`errors.NotFinite`). A 310P has no such mode: what is larger than
65,504 becomes 65,504, and what is no number 0 (CANN, environment variable INF_NAN_MODE_ENABLE; Ascend/pytorch
csrc/core/npu/NpuVariables.cpp, `IsSupportInfNan`, 9e73e70). Answers may still be good: other engines cut these few
numbers on purpose. So it is told once, and no request ends.
"""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)

LARGEST = 65504.0


class SaturationWatch:
    """For all layers of a model. Looks at the residual stream, which is where numbers grow large, and at prompts only:
    they are large for first tokens and separators, and a step of decodes has no time to spare."""

    def __init__(self) -> None:
        self._peaks: list[torch.Tensor] = []
        self._told = False

    def begin_step(self) -> None:
        """Reads what the step before has left: it is computed by now, so nobody waits."""
        if self._peaks and not self._told:
            peaks = torch.stack(self._peaks).tolist()
            layers = [layer for layer, peak in enumerate(peaks) if not peak < LARGEST]
            if layers:
                self._told = True
                logger.warning(
                    "Hidden states of layer %d%s reach %d, the most that float16 holds: an NPU 310P cuts what is "
                    "larger without an error, and answers may be worse for it. Compare them with another device's, in "
                    "bfloat16.",
                    layers[0],
                    "" if len(layers) == 1 else f" and {len(layers) - 1} others",
                    LARGEST,
                )
        self._peaks.clear()

    def look(self, stream_1TD: torch.Tensor, *, decodes: bool) -> None:
        """Once a layer, in their order."""
        if not self._told and not decodes:
            self._peaks.append(stream_1TD.abs().amax())
