"""`reprise serve`: flags that contradict each other are told, then the server runs."""

from __future__ import annotations

import argparse

from reprise_engine.entrypoints.arguments import ArgumentParser, server_options
from reprise_engine.errors import ConfigError
from reprise_engine.server import logs, start


def serve(parser: ArgumentParser, parsed: argparse.Namespace) -> int:
    """Run a server. The lines of a wrong flag go to the kubelet, too."""
    try:
        options = server_options(parsed)
    except ConfigError as error:
        logs.last_words(f"{type(error).__name__}: {error}")
        parser.error(str(error))
    return start.run(options)
