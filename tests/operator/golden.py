"""Golden manifests: what the Plan of each input is, kept as files, so that a change of the children is read in a diff.

`python -m tests.operator.golden` writes the outputs anew; read the diff before it is committed.
"""

from __future__ import annotations

import copy
from pathlib import Path

import yaml

from reprise_operator.kinds import OPTIONAL_TYPES
from reprise_operator.plan import plan
from reprise_operator.settings import Settings
from reprise_operator.spec import parse
from tests.support.factories import UID

PROJECT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parent / "data"


def inputs() -> dict[str, Path]:
    """Name of the output → its input: our own cases and every example."""
    cases = {path.stem: path for path in sorted((DATA / "input").glob("*.yaml"))}
    folder = PROJECT / "examples"
    examples = {
        f"example-{path.stem}": path for path in sorted([*folder.glob("*.yaml"), *folder.glob("ascend/*.yaml")])
    }
    return cases | examples


def output(name: str) -> Path:
    return DATA / "output" / f"{name}.yaml"


def render(path: Path) -> str:
    """The children of the InferenceService in `path`, as YAML documents, where every optional kind is there."""
    given = yaml.safe_load(path.read_text())
    given["metadata"] = {"namespace": "default", "uid": UID, "generation": 1, **given["metadata"]}
    made = plan(parse(given), Settings(), available=frozenset(OPTIONAL_TYPES))
    # Copied, since YAML would write what two children share as an anchor.
    return yaml.safe_dump_all([copy.deepcopy(dict(child)) for child in made.children], sort_keys=False, width=120)


if __name__ == "__main__":
    for name, path in inputs().items():
        output(name).write_text(render(path))
