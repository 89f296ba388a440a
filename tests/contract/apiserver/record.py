"""Records what a real kube-apiserver answers to the stories: `python -m tests.contract.apiserver.record [STORY …]`."""

from __future__ import annotations

import sys

import yaml

from tests.support.apiserver import start_api_server

from .replay import HERE, STORIES, client_of, install_definitions, play


def main(names: list[str]) -> int:
    # No controllers: they would write between two requests.
    with start_api_server("real", controllers=False) as server, client_of(server) as client:
        install_definitions(client)
        for name in names or STORIES:
            answers = dict(play(name, client))
            path = HERE / "answers" / f"{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(
                f"# Recorded from {server.version_line} by record.py; do not edit.\n"
                + yaml.safe_dump(answers, sort_keys=False, allow_unicode=True, width=160)
            )
            sys.stdout.write(f"{name}: {len(answers)} answers\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
