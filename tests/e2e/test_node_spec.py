"""What the node makes of a pod's spec, without running it: paths, programs, affinity, variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.node_spec import Image, Mount, build_launch, expand, rewrite, unschedulable


def test_paths_are_rewritten_only_where_a_path_begins() -> None:
    mounts = [Mount(container="/model", host=Path("/h/m")), Mount(container="/model/deep", host=Path("/h/d"))]
    table = {
        "/model": "/h/m",
        "/model/a": "/h/m/a",
        "/model/deep/a": "/h/d/a",
        "--model=/model": "--model=/h/m",
        "/models": "/models",
        "x/model": "x/model",
    }
    assert {text: rewrite(text, mounts) for text in table} == table


def test_the_program_of_an_image_is_found_where_it_is_although_a_volume_covers_its_folder(tmp_path: Path) -> None:
    program = tmp_path / "project" / "run"
    program.parent.mkdir()
    program.touch(mode=0o755)
    launch = build_launch(
        container={"args": [str(tmp_path / "data")]},
        image=Image(entrypoint=(str(program),), env={"PROJECT": str(program.parent)}),
        env={"HOME": str(tmp_path)},
        mounts=[Mount(container=str(tmp_path), host=Path("/h/t"))],
        pod_ip="127.0.1.1",
        cwd=tmp_path,
        termination_log=tmp_path / "words",
    )
    assert launch.argv == (str(program), "/h/t/data")
    assert launch.env["PROJECT"] == str(program.parent)
    assert launch.env["HOME"] == "/h/t"


@pytest.mark.parametrize(
    ("operator", "values", "fits"),
    [("In", ["a", "b"], True), ("In", ["b"], False), ("NotIn", ["a"], False), ("Exists", None, True)],
)
def test_required_node_affinity_is_honoured(operator: str, values: list[str] | None, fits: bool) -> None:
    term = {"matchExpressions": [{"key": "chip", "operator": operator, "values": values}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    pod = {"spec": {"containers": [], "affinity": {"nodeAffinity": required}}}
    why = unschedulable(pod, labels={"chip": "a"}, allocatable={"pods": "1"}, taken={})
    assert (why is None) is fits
    assert fits or "didn't match Pod's node affinity" in (why or "")


def test_variables_expand_as_in_kubernetes() -> None:
    assert expand("$(A)-$(B)-$$(A)-$(", {"A": "1"}) == "1-$(B)-$(A)-$("
