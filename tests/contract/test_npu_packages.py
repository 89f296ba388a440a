"""The Python packages of the image for NPUs: resolved and installed by the lock, and what the real torch_npu says here.

As in the image, the environment has the requirements of engine/pyproject.toml with the extra `npu`, constrained by
constraints.txt. What this environment has already (all but torch_npu) is seen by it and not fetched again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.contract.test_dockerfile import ROOT, STAGES, pins, project
from tests.support.npu.wheel import FOLDER
from tests.support.tiny_models import tiny_model_path

REQUIREMENTS = [*project("engine")["dependencies"], *project("engine")["optional-dependencies"]["npu"]]
_NO_INDEX = re.compile(
    r"No matching distribution|Could not find a version|Temporary failure|Connection|Max retries|SSL"
)
_CONFLICT = re.compile(r"ResolutionImpossible|conflict")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here: nothing is to be resolved"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its interpreter."""
    folder = tmp_path_factory.mktemp("npu")
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "this.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "-q", "--no-compile"]
    command += ["--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), "--find-links", str(FOLDER)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([*command, *REQUIREMENTS], capture_output=True, text=True, timeout=240)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if _NO_INDEX.search(done.stderr) and not _CONFLICT.search(done.stderr):
            pytest.skip(f"torch-npu cannot be fetched here: {last}")
        pytest.fail(done.stderr)
    return interpreter


def test_the_lock_resolves_and_installs(python: Path) -> None:
    code = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in ('torch', 'torch-npu')}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    found = {name: version.partition("+")[0] for name, version in json.loads(done.stdout).items()}
    assert found == {name: pins()[name] for name in ("torch", "torch-npu")}
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout


def test_the_image_installs_those_requirements() -> None:
    (install,) = [run for run in STAGES["engine-env"].all("RUN") if "requirements.txt" in run]
    assert "-c constraints.txt -r requirements.txt" in install
    assert "p['dependencies']" in install
    assert "p['optional-dependencies'][e]" in install


def ended(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`reprise` in that environment, without what the image sets."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment["PYTHONPATH"] = str(ROOT / "engine")
    command = [str(python), "-m", "reprise_engine.entrypoints.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)


@pytest.mark.skipif(Path("/usr/local/Ascend/driver").exists(), reason="there is a driver here")
def test_the_real_torch_npu_without_a_driver_is_one_message(python: Path) -> None:
    model = str(tiny_model_path("qwen3"))
    done = ended(python, "serve", model, "--host", "127.0.0.1", "--port", "0", "--device", "npu")
    assert done.returncode == 2, done.stderr
    told = re.search(r"--device is npu, but torch_npu cannot be imported: ([^.]+)\.", done.stderr)
    assert told, done.stderr
    assert told[1] in ("The Ascend driver is not visible here", "CANN is not found")
    assert "Traceback" not in done.stderr


def test_a_check_of_a_model_needs_no_npu(python: Path) -> None:
    """The operator runs it before it takes the last serving pod for a rollout, on a node that may have none."""
    done = ended(python, "check", str(tiny_model_path("qwen3")), "--device", "npu")
    assert done.returncode == 0, done.stderr
    assert "Qwen3ForCausalLM" in done.stdout
