"""`reprise fetch` as a pod runs it: killed in the middle, two at once, its exit codes and last words."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from reprise_engine.fetch.store import PRIVATE
from tests.support.model_hub import ModelHub, serving

TOKEN = "hf_a-secret-nobody-may-see"
WEIGHTS = bytes(range(256)) * 16_384  # 4 MiB
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "evil.py": b"boom"}
WANTED = {"config.json": b"{}", "model.safetensors": WEIGHTS}


@pytest.fixture
async def hub() -> AsyncIterator[ModelHub]:
    async with serving(ModelHub(files=dict(FILES))) as hub:
        yield hub


async def start(
    hub: ModelHub, *arguments: str, limit_file_bytes: int | None = None, **environment: str
) -> asyncio.subprocess.Process:
    def limit() -> None:
        if limit_file_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_file_bytes, limit_file_bytes))

    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reprise_engine.entrypoints.cli", "fetch", *arguments),
        env={**os.environ, **hub.hub_environment, "HF_HUB_OFFLINE": "1", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=limit if limit_file_bytes is not None else None,
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Exit code and what it said."""
    output, _ = await asyncio.wait_for(process.communicate(), timeout=60)
    assert process.returncode is not None
    return process.returncode, output.decode()


def part_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / PRIVATE / "parts").glob("*"))


async def half_of_it(folder: Path) -> int:
    """Waits until the half that the hub sends before its gate is on the volume, and no other file under way; bytes."""
    async with asyncio.timeout(60):
        while (size := part_bytes(folder)) != len(WEIGHTS) // 2:  # noqa: ASYNC110 - nothing tells of a file that grows
            await asyncio.sleep(0.02)
    return size


def present(folder: Path) -> Mapping[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and PRIVATE not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


async def test_killed_in_the_middle_it_goes_on_where_it_was(hub: ModelHub, tmp_path: Path) -> None:
    hub.gate = asyncio.Event()
    process = await start(hub, "hf://a/b", f"--to={tmp_path}")
    kept = await half_of_it(tmp_path)
    process.kill()
    await ended(process)
    assert not (tmp_path / PRIVATE / "complete.json").exists()
    assert "model.safetensors" not in present(tmp_path), "a half file is never in place"

    hub.gate.set()
    code, output = await ended(await start(hub, "hf://a/b", f"--to={tmp_path}"))
    assert (code, present(tmp_path)) == (0, WANTED)
    assert hub.asked["model.safetensors"] == ["bytes=0-", f"bytes={kept}-"]
    assert f"model.safetensors: goes on after {kept} of {len(WEIGHTS)} bytes" in output
    assert json.loads((tmp_path / PRIVATE / "complete.json").read_text())["uri"] == "hf://a/b"


async def test_bytes_that_a_crash_of_the_node_spoilt_are_fetched_again(hub: ModelHub, tmp_path: Path) -> None:
    hub.gate = asyncio.Event()
    process = await start(hub, "hf://a/b", f"--to={tmp_path}")
    kept = await half_of_it(tmp_path)
    process.kill()
    await ended(process)
    (part,) = (tmp_path / PRIVATE / "parts").iterdir()
    part.write_bytes(bytes(kept))
    hub.gate.set()
    code, output = await ended(await start(hub, "hf://a/b", f"--to={tmp_path}"))
    assert (code, present(tmp_path)) == (0, WANTED)
    assert "is not what the listing says" in output


async def told_to_wait(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), timeout=60)
    assert b"another process fetches into" in line


async def test_of_two_at_once_one_fetches_and_the_other_waits(hub: ModelHub, tmp_path: Path) -> None:
    hub.gate = asyncio.Event()
    first = await start(hub, "hf://a/b", f"--to={tmp_path}")
    await half_of_it(tmp_path)
    second = await start(hub, "hf://a/b", f"--to={tmp_path}")
    await told_to_wait(second)
    hub.gate.set()
    (code, _), (other, output) = await asyncio.gather(ended(first), ended(second))
    assert (code, other) == (0, 0)
    assert "by another process" in output
    assert hub.asked["model.safetensors"] == ["bytes=0-"]
    assert present(tmp_path) == WANTED


async def test_whoever_waits_takes_over_when_the_other_is_killed(hub: ModelHub, tmp_path: Path) -> None:
    hub.gate = asyncio.Event()
    first = await start(hub, "hf://a/b", f"--to={tmp_path}")
    kept = await half_of_it(tmp_path)
    second = await start(hub, "hf://a/b", f"--to={tmp_path}")
    await told_to_wait(second)
    first.kill()
    await ended(first)
    hub.gate.set()
    code, _ = await ended(second)
    assert (code, present(tmp_path)) == (0, WANTED)
    assert hub.asked["model.safetensors"] == ["bytes=0-", f"bytes={kept}-"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_at_once(hub: ModelHub, tmp_path: Path, number: signal.Signals) -> None:
    hub.gate = asyncio.Event()
    process = await start(hub, "hf://a/b", f"--to={tmp_path}")
    await half_of_it(tmp_path)
    process.send_signal(number)
    code, output = await ended(process)
    assert code == 128 + number
    assert f"stopped by {number.name}" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "change", "code", "words"),
    [
        (["hf://a"], {}, 2, "ConfigError: the model is 'hf://a'"),
        (["hf://a/b", "--parallel=0"], {}, 2, "ConfigError: --parallel is 0"),
        (["hf://a/b", "--revision=v9"], {}, 3, "ModelNotFound: hf://a/b@v9: HTTP 404"),
        (["hf://a/b"], {"token": "another"}, 4, "ModelFetchDenied: hf://a/b: HTTP 401"),
        (["hf://a/b"], {"sizes": {"model.safetensors": 1 << 60}}, 5, "ModelVolumeFull: "),
        (["hf://a/b"], {"corrupt": {"model.safetensors": 9}}, 7, "DamagedModel: model.safetensors"),
    ],
)
async def test_exit_codes_and_last_words(
    hub: ModelHub, tmp_path: Path, arguments: list[str], change: dict[str, object], code: int, words: str
) -> None:
    for name, value in change.items():
        setattr(hub, name, value)
    log = tmp_path / "termination-log"
    log.touch()
    done = await start(hub, *arguments, f"--to={tmp_path / 'm'}", TERMINATION_LOG_PATH=str(log), HF_TOKEN=TOKEN)
    found, output = await ended(done)
    assert found == code
    assert log.read_text().startswith(words)
    assert "Traceback" not in output
    assert TOKEN not in output + log.read_text()


async def test_a_volume_that_is_full_in_the_middle(hub: ModelHub, tmp_path: Path) -> None:
    """The limit of a file's size stands in for that of a volume: the same error at the same place, EFBIG for ENOSPC."""
    log = tmp_path / "termination-log"
    log.touch()
    process = await start(
        hub, "hf://a/b", f"--to={tmp_path / 'm'}", limit_file_bytes=1 << 20, TERMINATION_LOG_PATH=str(log)
    )
    code, output = await ended(process)
    assert (code, "Traceback" in output) == (5, False)
    assert log.read_text().startswith("ModelVolumeFull: ")
    assert "spec.model.cache" in log.read_text()
    code, _ = await ended(await start(hub, "hf://a/b", f"--to={tmp_path / 'm'}"))
    assert (code, present(tmp_path / "m")) == (0, WANTED)
    assert hub.asked["model.safetensors"][1] != "bytes=0-", "what fitted is kept"


async def test_no_torch_and_no_hub_client_is_imported(hub: ModelHub, tmp_path: Path) -> None:
    program = f"""
import sys
from reprise_engine.entrypoints.cli import main
code = main(["fetch", "hf://a/b", "--to={tmp_path}"])
print(code, sorted(sys.modules.keys() & {{"torch", "transformers", "huggingface_hub", "minio"}}))
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        env={**os.environ, **hub.hub_environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert (await ended(process))[1] == "0 []\n"
