"""The server as vLLM's users start it: `python -m reprise_engine.entrypoints.openai.api_server --model=…`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from reprise_engine.entrypoints.arguments import build_api_server_parser
from reprise_engine.entrypoints.serve import serve


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_api_server_parser()
    return serve(parser, parser.parse_args(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
