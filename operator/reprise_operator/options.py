"""The command line of the operator: flags and environment → Options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from reprise_operator.rotation import MIN_KEY_BYTES
from reprise_operator.settings import Settings

ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - the kubelet's probes and Prometheus come to the pod's address


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run of the operator: what the pure half is given, and what only the process needs."""

    settings: Settings
    host: str = ANY_ADDRESS
    lease_namespace: str | None = None
    """Where the lease is kept; None runs without leader election."""
    reference_key: bytes | None = field(default=None, repr=False)
    """Of the hashes of Secrets and ConfigMaps (references.py); None makes one up for this process."""
    log_format: str = "json"
    log_level: str = "info"


def parse_options(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Every flag has an environment variable, REPRISE_OPERATOR_ and the flag's name; the flag wins.

    Exits with 2 and a message on stderr when they make no sense.
    """
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="reprise-operator",
        allow_abbrev=False,
        description="The operator of InferenceServices (serving.reprise.io).",
    )
    parser.add_argument("--version", action="version", version=f"reprise-operator {version('reprise-operator')}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", allow_abbrev=False, help="run the operator until SIGTERM")

    def add(flag: str, default: object, convert: type, text: str, *names: str) -> None:
        name = "REPRISE_OPERATOR_" + flag.removeprefix("--").replace("-", "_").upper()
        # argparse converts a default that is a string, so a bad environment variable is a usage error too.
        given = environment.get(name, default)
        help_text = f"{text} [${name}; {default if default not in (None, '') else 'unset'}]".replace("%", "%%")
        run.add_argument(flag, *names, type=convert, default=given, help=help_text)

    add("--namespace", None, str, "serve this namespace only", "-n")
    run.add_argument(
        "-A", "--all-namespaces", action="store_true", help="serve all namespaces (the default is one of the two)"
    )
    add("--reprise-image", defaults.reprise_image, str, "image of the reprise runtime where the spec names none")
    add("--vllm-ascend-image", defaults.vllm_ascend_image, str, "image of the vllm-ascend runtime, likewise")
    add("--endpoint-picker-image", defaults.endpoint_picker_image, str, "image of managed endpoint pickers")
    add(
        "--endpoint-picker-service-account",
        defaults.endpoint_picker_service_account,
        str,
        "their service account, in the namespace of each",
    )
    add(
        "--fetch-image",
        None,
        str,
        "image that fetches models; else the engine's where that is ours, else --reprise-image",
    )
    add("--workers", defaults.workers, int, "reconciles at a time")
    add("--resync-seconds", defaults.resync_seconds, float, "every service is looked at this often without any news")
    add("--discovery-seconds", defaults.discovery_seconds, float, "how often optional kinds are looked for")
    add("--scrape-seconds", defaults.scrape_seconds, float, "how often the engines' /metrics are read")
    add("--scrape-concurrency", defaults.scrape_concurrency, int, "engines read at a time")
    add("--scrape-timeout-seconds", defaults.scrape_timeout_seconds, float, "patience with one engine")
    add("--hit-rate-window-seconds", defaults.hit_rate_window_seconds, float, "window of the hit rate")
    add(
        "--status-min-interval-seconds",
        defaults.status_min_interval_seconds,
        float,
        "least time between two writes of a service's figures",
    )
    add("--prometheus-url", None, str, "Prometheus that KEDA asks for the load, where the spec names none")
    run.add_argument(
        "--read-nodes",
        action="store_true",
        help="look for free NPUs on the nodes, to add a pod before one is taken; all namespaces only",
    )
    add(
        "--watch-inactivity-seconds",
        defaults.watch_inactivity_seconds,
        float,
        "a watch that brings nothing, not even a bookmark, for so long is opened anew",
    )
    add(
        "--watch-patience-seconds",
        defaults.watch_patience_seconds,
        float,
        "a watch that owes an event for so long turns the liveness probe red",
    )
    add("--host", ANY_ADDRESS, str, "address the two HTTP servers listen on")
    add("--metrics-port", defaults.metrics_port, int, "GET /metrics; 0 takes a free port")
    add("--health-port", defaults.health_port, int, "GET /healthz and /readyz; 0 takes a free port")
    add("--reference-key-file", None, str, "file with the key of the hashes of Secrets and ConfigMaps")
    add("--lease-namespace", None, str, "elect a leader by a Lease in this namespace")
    add("--log-format", "json", str, "json or text")
    add("--log-level", "info", str, "debug, info, warning or error")
    values = parser.parse_args(arguments)

    all_namespaces = values.all_namespaces or environment.get("REPRISE_OPERATOR_ALL_NAMESPACES", "").lower() == "true"
    if bool(values.namespace) == all_namespaces:
        run.error("say which namespaces to serve: either --namespace NAME or --all-namespaces")
    read_nodes = values.read_nodes or environment.get("REPRISE_OPERATOR_READ_NODES", "").lower() == "true"
    if read_nodes and not all_namespaces:
        run.error("--read-nodes needs --all-namespaces: the pods of every namespace take devices")
    for name in (
        *("workers", "resync_seconds", "discovery_seconds"),
        *("scrape_seconds", "scrape_concurrency", "scrape_timeout_seconds"),
        *("watch_inactivity_seconds", "watch_patience_seconds"),
    ):
        if getattr(values, name) <= 0:
            run.error(f"--{name.replace('_', '-')} is {getattr(values, name)}; it must be above 0")
    if values.hit_rate_window_seconds < 2 * values.scrape_seconds:
        run.error(
            f"--hit-rate-window-seconds is {values.hit_rate_window_seconds:g}; it must be at least twice "
            f"--scrape-seconds, which is {values.scrape_seconds:g}"
        )
    for name, choices in (("log_format", ("json", "text")), ("log_level", ("debug", "info", "warning", "error"))):
        if getattr(values, name) not in choices:
            run.error(
                f"--{name.replace('_', '-')} is {getattr(values, name)!r}; it must be one of {', '.join(choices)}"
            )
    reference_key: bytes | None = None
    if values.reference_key_file:
        try:
            reference_key = Path(values.reference_key_file).read_bytes().strip()
        except OSError as error:
            run.error(f"--reference-key-file {values.reference_key_file}: {error.strerror}")
        if len(reference_key) < MIN_KEY_BYTES:
            run.error(
                f"--reference-key-file {values.reference_key_file} holds {len(reference_key)} bytes; "
                f"at least {MIN_KEY_BYTES} random ones are needed"
            )
    return Options(
        settings=Settings(
            namespace=values.namespace or None,
            reprise_image=values.reprise_image,
            vllm_ascend_image=values.vllm_ascend_image,
            endpoint_picker_image=values.endpoint_picker_image,
            endpoint_picker_service_account=values.endpoint_picker_service_account,
            fetch_image=values.fetch_image or None,
            workers=values.workers,
            resync_seconds=values.resync_seconds,
            discovery_seconds=values.discovery_seconds,
            scrape_seconds=values.scrape_seconds,
            scrape_concurrency=values.scrape_concurrency,
            scrape_timeout_seconds=values.scrape_timeout_seconds,
            hit_rate_window_seconds=values.hit_rate_window_seconds,
            status_min_interval_seconds=values.status_min_interval_seconds,
            prometheus_url=values.prometheus_url or None,
            read_nodes=read_nodes,
            watch_inactivity_seconds=values.watch_inactivity_seconds,
            watch_patience_seconds=values.watch_patience_seconds,
            metrics_port=values.metrics_port,
            health_port=values.health_port,
        ),
        host=values.host,
        lease_namespace=values.lease_namespace or None,
        reference_key=reference_key,
        log_format=values.log_format,
        log_level=values.log_level,
    )
