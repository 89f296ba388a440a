"""`make demo`: the main job, on this machine, in one command. KEEP=1 (--keep) leaves the cluster running.

A cluster and the operator are started, examples/smollm2.yaml is applied, two customers talk to the endpoint through the
OpenAI client; then prefix caching is switched off in the manifest and they say the same again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import openai
import yaml
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from tests.support.cluster import PROJECT
from tests.support.demo_cluster import ClusterDidNotStart, ClusterProcess, Up, cluster_process
from tests.support.demo_conversation import (
    CONVERSATIONS,
    MODEL,
    SYSTEM_PROMPT,
    Turn,
    add_row,
    ask,
    comparison,
    new_table,
)
from tests.support.kubectl import Kubectl, KubectlFailed
from tests.support.node_client import Manifest

MANIFEST = PROJECT / "examples" / "smollm2.yaml"
READY_SECONDS = 600.0
FIGURES_SECONDS = 60.0
LEAST_RATIO = 5.0
"""By which the second conversation's first token must come sooner than the first's."""


class DemoFailed(Exception):
    """Something did not happen; the message says what, and what was seen instead."""


class Demo:
    """The steps, in the order in which `run` takes them."""

    def __init__(self, *, console: Console, cluster: ClusterProcess) -> None:
        self._console = console
        self._cluster = cluster
        self._kubectl = Kubectl(kubeconfig=Path(cluster.up.kubeconfig))
        self._manifest: Manifest = yaml.safe_load(MANIFEST.read_text())
        self._name: str = self._manifest["metadata"]["name"]

    def run(self, *, keep: bool) -> None:
        say = self._console.print
        say(f"API server: {self._cluster.up.api_server}; one node that runs pods as processes; the operator.")
        self._show("apply", "-f", str(MANIFEST.relative_to(PROJECT)))
        self._wait_ready()
        cached = self._talk("Prefix caching on")
        self._wait_for_hit_rate()
        self._show("get", "risvc", "-o", "wide")

        say("\nThe same manifest with [bold]prefixCaching.enabled: false[/bold]:")
        self._apply(enabled=False)
        self._wait_ready()
        self._show("get", "risvc", "-o", "wide")
        uncached = self._talk("Prefix caching off")
        say(comparison(cached, uncached))
        self._judge(cached, uncached)
        if keep:
            say("\nCaching on again, since it stays:")
            self._apply(enabled=True)
            self._wait_ready()

    def _show(self, *args: str) -> None:
        self._console.print(f"\n[bold]$ kubectl {escape(' '.join(args))}[/bold]")
        self._console.print(self._kubectl(*args).rstrip(), markup=False, highlight=False, soft_wrap=True)

    def _apply(self, *, enabled: bool) -> None:
        changed = {**self._manifest, "spec": {**self._manifest["spec"], "prefixCaching": {"enabled": enabled}}}
        self._console.print("[bold]$ kubectl apply -f -[/bold]")
        self._console.print(self._kubectl.apply(changed).rstrip(), markup=False)

    def _body(self) -> Manifest:
        return self._kubectl.get("inferenceservice", self._name) or {}

    def _wait_ready(self) -> None:
        """Until the present generation is Ready; says meanwhile what it waits for."""

        def look() -> tuple[bool, str]:
            body = self._body()
            conditions = {c["type"]: c for c in (body.get("status") or {}).get("conditions") or ()}
            ready, stalled = conditions.get("Ready", {}), conditions.get("Stalled", {})
            current = ready.get("observedGeneration") == body["metadata"]["generation"]
            if current and stalled.get("status") == "True":
                raise DemoFailed(f"{self._name} is stalled ({stalled['reason']}): {stalled['message']}")
            message = str(ready.get("message", "")) if current else "the operator has not seen the manifest yet"
            return current and ready.get("status") == "True", f"{self._name}: {message}"

        took = self._wait(look, within=READY_SECONDS)
        self._console.print(f"[green]✓[/green] {self._name} is Ready after {took:.1f} s")

    def _wait_for_hit_rate(self) -> None:
        def look() -> tuple[bool, str]:
            figures = (self._body().get("status") or {}).get("prefixCache") or {}
            return "hitRatePercent" in figures, "the operator reads the pods' figures"

        self._wait(look, within=FIGURES_SECONDS)

    def _wait(self, look: Callable[[], tuple[bool, str]], *, within: float) -> float:
        began, told = time.monotonic(), ""
        with self._console.status("waiting") as status:
            while True:
                done, message = look()
                elapsed = time.monotonic() - began
                if done:
                    return elapsed
                if elapsed > within:
                    raise DemoFailed(f"Not within {within:.0f} s. Last seen: {message}")
                if not self._console.is_terminal and message != told:
                    self._console.print(f"  {elapsed:5.1f} s  {message}", markup=False)
                    told = message
                status.update(f"{elapsed:5.1f} s  {escape(message)}")
                time.sleep(0.5)

    def _endpoint(self) -> str:
        def look() -> tuple[bool, str]:
            return self._cluster.up.service_url("default", self._name) is not None, f"the Service {self._name}"

        self._wait(look, within=FIGURES_SECONDS)
        return f"{self._cluster.up.service_url('default', self._name)}/v1"

    def _talk(self, title: str) -> list[Turn]:
        """All turns of all conversations, one after another."""
        turns: list[Turn] = []
        table = new_table(title)
        self._console.print()
        with (
            openai.OpenAI(base_url=self._endpoint(), api_key="none", max_retries=0, timeout=600) as client,
            Live(table, console=self._console, refresh_per_second=4),
        ):
            for conversation, questions in enumerate(CONVERSATIONS, start=1):
                messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": SYSTEM_PROMPT}]
                for number, question in enumerate(questions, start=1):
                    messages.append({"role": "user", "content": question})
                    turn = ask(client, messages, conversation=conversation, number=number)
                    messages.append({"role": "assistant", "content": turn.answer})
                    turns.append(turn)
                    add_row(table, turn)
        if not self._console.is_terminal:
            self._console.print()  # Live ends its last line only on a terminal
        return turns

    def _judge(self, cached: Sequence[Turn], uncached: Sequence[Turn]) -> None:
        first = next(turn for turn in cached if turn.conversation == 1)
        second = next(turn for turn in cached if turn.conversation == 2)
        ratio = first.first_token_seconds / second.first_token_seconds
        self._console.print(
            f"\nThe second customer's first token came [bold]{ratio:.1f} times sooner[/bold] than the first's "
            f"({second.first_token_seconds:.2f} s against {first.first_token_seconds:.2f} s): "
            f"{second.cached_tokens:,} of {second.prompt_tokens:,} prompt tokens were in the cache."
        )
        if any(turn.cached_tokens for turn in uncached):
            raise DemoFailed("Tokens were reported as cached although prefix caching was off.")
        if ratio < LEAST_RATIO:
            raise DemoFailed(f"At least {LEAST_RATIO:g} times sooner was expected.")


def how_to_go_on(up: Up) -> str:
    """For KEEP=1: how to talk to what runs, and how to end it."""
    url = up.service_url("default", MODEL)
    programs = Path(os.path.relpath(sys.executable)).parent
    return f"""
It keeps running. In this or another terminal:

  export KUBECONFIG={up.kubeconfig}
  {programs}/kubectl get risvc -o wide
  {programs}/kubectl describe risvc {MODEL}
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
  {programs}/python -c "import openai; c = openai.OpenAI(base_url='{url}/v1', api_key='none'); \\
    print(c.chat.completions.create(model='{MODEL}', messages=[{{'role': 'user', 'content': 'Hello!'}}]))"

Logs of the operator and the pods: {up.folder}
To end it and remove all it made: kill {up.pid}
"""


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 when everything happened as it should; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make demo", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--keep", action="store_true", help="leave the cluster running, and say how to talk to it")
    keep: bool = parser.parse_args(arguments).keep
    # What is piped into a file or a log is not cut at 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    folder = PROJECT / ".cache" / "demo" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as stack:
            with console.status("starting an API server, a node and the operator"):
                cluster = stack.enter_context(cluster_process(folder))
            Demo(console=console, cluster=cluster).run(keep=keep)
            if keep:
                cluster.keep()
                console.print(how_to_go_on(cluster.up), markup=False, highlight=False, soft_wrap=True)
                return 0
    except KeyboardInterrupt:
        console.print("\nInterrupted; nothing is left running.")
        shutil.rmtree(folder, ignore_errors=True)
        return 130
    except (DemoFailed, ClusterDidNotStart, KubectlFailed, openai.OpenAIError) as error:
        console.print(f"[red]✗[/red] {escape(str(error))}\nLogs: {folder}", soft_wrap=True)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    console.print("Everything it started has ended.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
