"""The children of each input are what they were when somebody last read them."""

from __future__ import annotations

import pytest

from tests.operator.golden import DATA, inputs, output, render


@pytest.mark.parametrize("name", inputs())
def test_children_are_as_recorded(name: str) -> None:
    assert output(name).exists(), "run `python -m tests.operator.golden`"
    assert render(inputs()[name]) == output(name).read_text(), "if meant, run `python -m tests.operator.golden`"


def test_no_output_without_an_input() -> None:
    assert {path.stem for path in (DATA / "output").glob("*.yaml")} == set(inputs())
