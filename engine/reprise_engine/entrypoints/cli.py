"""The command `reprise`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from reprise_engine.entrypoints import bench, evaluate, fetch
from reprise_engine.entrypoints.arguments import build_parser
from reprise_engine.entrypoints.serve import serve
from reprise_engine.npu_environment import npu_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; argparse itself exits with 2 for a wrong flag."""
    os.environ.update(npu_settings(os.environ))  # before any command imports torch
    parser = build_parser()
    parsed = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if parsed.command == "bench":
        return bench.main(parsed)
    if parsed.command == "check":
        from reprise_engine.entrypoints import check  # only here: a server imports its tokenizer library later

        return check.main(parsed)
    if parsed.command == "eval":
        return evaluate.main(parsed)
    if parsed.command == "fetch":
        return fetch.main(parsed)
    return serve(parser, parsed)


if __name__ == "__main__":
    sys.exit(main())
