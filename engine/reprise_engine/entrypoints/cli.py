"""The command `reprise`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from reprise_engine.entrypoints import bench, check, evaluate, fetch
from reprise_engine.entrypoints.arguments import ArgumentParser, build_parser, server_options
from reprise_engine.errors import ConfigError
from reprise_engine.server import lifecycle, logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; argparse itself exits with 2 for a wrong flag."""
    parser = build_parser()
    parsed = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if parsed.command == "bench":
        return bench.main(parsed)
    if parsed.command == "check":
        return check.main(parsed)
    if parsed.command == "eval":
        return evaluate.main(parsed)
    if parsed.command == "fetch":
        return fetch.main(parsed)
    return serve(parser, parsed)


def serve(parser: ArgumentParser, parsed: argparse.Namespace) -> int:
    """Run a server. The lines of a wrong flag go to the kubelet, too."""
    try:
        options = server_options(parsed)
    except ConfigError as error:
        logs.last_words(f"{type(error).__name__}: {error}")
        parser.error(str(error))
    return lifecycle.run(options)


if __name__ == "__main__":
    sys.exit(main())
