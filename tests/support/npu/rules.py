"""What the hardware refuses, rule by rule, each with the place in the vendor's sources that says so.

A rule is checked by calling it: `HEAD_SIZE.require(size <= 256, f"head size {size}")`. Where a source only documents
what the kernels then do not check, and a wrong call would read or write foreign memory, the rule says `unchecked=True`:
the hardware would go on with wrong results, so the emulation must not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Repository:
    """A snapshot of a vendor's public sources."""

    name: str
    commit: str
    """Full hash, or a version for a package."""
    date: str

    def at(self, path: str, *lines: int) -> Source:
        return Source(self, path, lines)


@dataclass(frozen=True)
class Source:
    repository: Repository
    path: str
    lines: tuple[int, ...]
    """One line, or the first and the last."""

    def __str__(self) -> str:
        lines = "".join(f":{line}" for line in self.lines[:1]) + "".join(f"-{line}" for line in self.lines[1:])
        return f"{self.path}{lines} @ {self.repository.name} {self.repository.commit[:12]} ({self.repository.date})"


OPS_TRANSFORMER = Repository("mirror-cann/ops-transformer", "3a280bcc34d8716c477c5506f3e507c1d0ea3214", "2026-07-21")
"""CANN's attention operators: their checks win over the pages where the two disagree."""
OPS_TRANSFORMER_910 = Repository(
    "mirror-cann/ops-transformer", "06be6c2cafbf31f8bf34ce9baa5170dac08e7342", "2026-07-21"
)
"""The same as CANN 9.1.0 has them: for what has been cured since."""
OPS_NN = Repository("hicann/ops-nn", "e5c3fa9327ea95ba26d06227e746923580d10921", "2026-08-22")
"""CANN's norms, activations and quantised matmuls."""
OP_PLUGIN = Repository("Ascend/op-plugin", "517f2e7d0f202f38b76310706cb977ca2388ad21", "2026-08-21")
"""torch_npu's own C++ (shapes of outputs, its checks) and its documentation pages."""
TORCH_NPU = Repository("Ascend/pytorch", "9e73e708ab9350d203475609f36f8a43f6a0c2ab", "2026-08-21")
"""torch_npu itself: how a tensor's storage format is kept, and what copies make of it."""
ATB = Repository("hicann/ascend-transformer-boost", "ddcc8b6225b8b7d4703c69c319244bdea0f0c9a1", "2026-07-22")
"""The operators that a 310P's attention calls: their checks, their tilings and their kernels, as CANN 9.1 has them."""
FIELD_REPORT = Repository("a report from a service on a 310P", "as published", "2026-07-08")
"""Of one that serves in production; the only word on what it says."""
VLLM_ASCEND = Repository("vllm-project/vllm-ascend", "182b75ea84ff13ece27b57391331ef8935410aea", "2026-08-22")
"""A caller in production: layouts and limits of 310P that no page of the vendor gives."""
WHEEL = Repository("torch-npu", "2.13.0", "PyPI")


class NotSupportedByNpu(RuntimeError):
    """A call that an NPU refuses, or would compute wrongly without a word."""

    def __init__(self, rule: Rule, detail: str) -> None:
        super().__init__(f"{rule.name}: {rule.says}; {detail} [{rule.source}]")
        self.rule = rule


@dataclass(frozen=True)
class Rule:
    name: str
    says: str
    source: Source
    unchecked: bool = False
    """No check on the hardware: the call would go through and corrupt."""

    def require(self, holds: bool, detail: str) -> None:
        """Raises NotSupportedByNpu unless the rule holds; `detail` says what was given."""
        if not holds:
            raise NotSupportedByNpu(self, detail)
