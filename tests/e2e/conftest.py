"""The site of the end-to-end tests: a cluster of our own, or, under `pytest -m cluster` (make e2e), KUBECONFIG's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.named_cluster import named_site
from tests.e2e.site import Site
from tests.support.apiserver import ApiServer
from tests.support.cluster import ENGINE_IMAGE, ClusterConfig, engine_image, start_cluster
from tests.support.kubectl import Kubectl, eventually, namespace
from tests.support.request_recorder import recording
from tests.support.tiny_models import make_tiny_model
from tests.support.vllm_image import vllm_images

NAMESPACE = "e2e"
# Short, so that tests need not wait for minutes; the proportions are those of the defaults.
OPERATOR_ARGS = (
    *("--scrape-seconds", "1", "--status-min-interval-seconds", "2", "--hit-rate-window-seconds", "30"),
    *("--resync-seconds", "600"),  # long: what must happen at once is not to be saved by a resync
)


# Not a session: this operator looks after all namespaces, those of tests/operator too, which are to have none.
@pytest.fixture(scope="package")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if request.config.option.markexpr == "cluster":
        with named_site() as site:
            yield site
    else:
        with _own_site(request.getfixturevalue("api_server"), tmp_path_factory.mktemp("cluster")) as site:
            yield site


@contextlib.contextmanager
def _own_site(api: ApiServer, folder: Path) -> Iterator[Site]:
    models = folder / "models"
    make_tiny_model("qwen3", models / "tiny")
    _write_multimodal(models / "multimodal")
    names = ("tiny", "multimodal", "absent")
    with recording(api.kubeconfig_path, folder=folder) as requests:
        config = ClusterConfig(
            folder=folder / "run",
            npus=2,
            host_paths={"/models": models},
            images={ENGINE_IMAGE: engine_image(), **vllm_images()},
            operator_args=OPERATOR_ARGS,
            operator_kubeconfig=requests.kubeconfig,
        )
        with start_cluster(api, config) as cluster:
            kubectl = Kubectl(kubeconfig=api.kubeconfig_path, namespace=NAMESPACE)
            kubectl.apply(namespace(NAMESPACE))
            if api.has_controller_manager:
                eventually(lambda: kubectl.get("serviceaccount", "default"), "the namespace's service account")

            @contextlib.contextmanager
            def reach(service: str) -> Iterator[str]:
                yield cluster.node.service_url(NAMESPACE, service)

            try:
                yield Site(
                    kubectl=kubectl,
                    model_uri="hostpath:///models/tiny",
                    model_uris={name: f"hostpath:///models/{name}" for name in names},
                    image=None,
                    reach=reach,
                    start_operator=cluster.operator.start,
                    stop_operator=lambda: None if cluster.operator.stop() == 0 else _ended_badly(cluster.operator.log),
                    requests=requests,
                )
            finally:
                assert cluster.operator.running, f"the operator has ended:\n{cluster.operator.last_words()}"


def _ended_badly(log: Path) -> None:
    raise AssertionError(f"the operator did not end with 0 on SIGTERM:\n{log.read_text()[-2000:]}")


def _write_multimodal(folder: Path) -> None:
    """A folder that lacks nothing but a supported architecture."""
    make_tiny_model("llama", folder)
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
