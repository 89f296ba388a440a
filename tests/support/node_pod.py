"""The life of one pod on the node: volumes, init containers, containers with restarts and back-off, termination."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import aiohttp

from tests.support.node_client import MERGE_PATCH, KubeClient, KubeError, Manifest
from tests.support.node_probe import Prober
from tests.support.node_process import ContainerProcess, run_to_end, timestamp
from tests.support.node_spec import ConfigProblem, Image, ImageProblem, Launch, build_launch, find_image
from tests.support.node_status import ContainerState, pod_status
from tests.support.node_volumes import MountProblem, environment_of, mounts_of, prepare_volume

RETRY_SECONDS = 1.0
"""How often a pod that waits for a Secret, a ConfigMap, a claim or a host path looks again."""

BACK_OFF_RESET_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What a pod needs to know of its node."""

    client: KubeClient
    name: str
    address: str
    folder: Path
    images: Mapping[str, Image]
    host_paths: Mapping[str, Path]
    probe_session: aiohttp.ClientSession
    back_off_seconds: float
    back_off_limit_seconds: float
    fastest_probe_seconds: float | None
    record: Callable[[Manifest, str, str, str], Awaitable[None]]
    """(pod, "Normal" | "Warning", reason, message): writes an Event, best effort."""


class PodWorker:
    """Runs one pod until `terminate`. Made inside the event loop."""

    def __init__(self, *, pod: Manifest, ip: str, node: NodeContext) -> None:
        self.pod = pod
        self.ip = ip
        self._node = node
        meta, spec = pod["metadata"], pod["spec"]
        self._path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        self.folder = node.folder / "pods" / f"{meta['namespace']}_{meta['name']}_{meta['uid']}"
        waiting = "PodInitializing" if spec.get("initContainers") else "ContainerCreating"
        self._inits = [
            ContainerState(name=c["name"], image=c.get("image", ""), init=True, state=_waiting("PodInitializing"))
            for c in spec.get("initContainers") or ()
        ]
        self._containers = [
            ContainerState(name=c["name"], image=c.get("image", ""), state=_waiting(waiting))
            for c in spec["containers"]
        ]
        self._policy = spec.get("restartPolicy") or "Always"
        self._running: dict[str, tuple[ContainerProcess, Launch]] = {}
        self._volumes: dict[str, Path] = {}
        self._start_time = timestamp()
        self._published: Manifest = dict(pod.get("status") or {})
        self._dirty = asyncio.Event()
        self._dirty.set()
        self._asides: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._life = asyncio.create_task(self._live())
        self._publisher = asyncio.create_task(self._publish())

    # ---- status -----------------------------------------------------------------------------------------------------

    async def _publish(self) -> NoReturn:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._publish_once()
            except (KubeError, aiohttp.ClientError, TimeoutError, OSError) as error:
                if isinstance(error, KubeError) and error.status in (404, 409, 422):
                    continue  # the pod is gone, or is another one by now
                self._dirty.set()
                await asyncio.sleep(0.5)

    async def _publish_once(self) -> None:
        status = pod_status(
            containers=self._containers,
            inits=self._inits,
            previous=self._published,
            restart_policy=self._policy,
            pod_ip=self.ip,
            host_ip=self._node.address,
            start_time=self._start_time,
        )
        if status != self._published:
            patch = {"metadata": {"uid": self.pod["metadata"]["uid"]}, "status": status}
            await self._node.client.request("PATCH", f"{self._path}/status", body=patch, content_type=MERGE_PATCH)
            self._published = status

    async def _event(self, kind: str, reason: str, message: str) -> None:
        await self._node.record(self.pod, kind, reason, message)

    def _aside(self, job: Coroutine[None, None, None]) -> None:
        """Runs something beside the pod's own course; the set keeps the task alive."""
        task = asyncio.create_task(job)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    # ---- life -------------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        await self._mount()
        for spec, state in zip(self.pod["spec"].get("initContainers") or (), self._inits, strict=True):
            if not await self._keep(spec, state):
                return  # restartPolicy Never, and it failed
        for state in self._containers:
            state.state = _waiting("ContainerCreating")
        self._dirty.set()
        async with asyncio.TaskGroup() as group:
            for spec, state in zip(self.pod["spec"]["containers"], self._containers, strict=True):
                group.create_task(self._keep(spec, state))

    async def _fetch(self, plural: str, name: str) -> Manifest | None:
        return await self._node.client.get(f"/api/v1/namespaces/{self.pod['metadata']['namespace']}/{plural}/{name}")

    async def _mount(self) -> None:
        told = ""
        for volume in self.pod["spec"].get("volumes") or ():
            while volume["name"] not in self._volumes:
                try:
                    self._volumes[volume["name"]] = await prepare_volume(
                        volume,
                        pod=self.pod,
                        pod_folder=self.folder,
                        claims_folder=self._node.folder / "claims",
                        host_paths=self._node.host_paths,
                        fetch=self._fetch,
                        pod_ip=self.ip,
                        host_ip=self._node.address,
                    )
                except (MountProblem, KubeError, OSError, aiohttp.ClientError) as problem:
                    if str(problem) != told:
                        told = str(problem)
                        await self._event("Warning", "FailedMount", told)
                    await asyncio.sleep(RETRY_SECONDS)

    async def _keep(self, spec: Manifest, state: ContainerState) -> bool:
        """Runs a container, again and again as its policy says. True if its last run succeeded."""
        crashes = 0
        while True:
            launch = await self._prepare(spec, state)
            began = asyncio.get_running_loop().time()
            code = await self._run(spec, state, launch)
            if state.init and code == 0:
                return True
            if self._policy == "Never" or (self._policy == "OnFailure" and code == 0):
                return code == 0
            if asyncio.get_running_loop().time() - began > BACK_OFF_RESET_SECONDS:
                crashes = 0
            if crashes > 0:
                delay = min(self._node.back_off_seconds * 2 ** (crashes - 1), self._node.back_off_limit_seconds)
                await self._back_off(state, delay)
            crashes += 1
            state.restart_count += 1

    async def _back_off(self, state: ContainerState, delay: float) -> None:
        meta = self.pod["metadata"]
        message = (
            f"back-off {delay:g}s restarting failed container={state.name} "
            f"pod={meta['name']}_{meta['namespace']}({meta['uid']})"
        )
        state.last_state, state.state = state.state, _waiting("CrashLoopBackOff", message)
        self._dirty.set()
        await self._event("Warning", "BackOff", message)
        await asyncio.sleep(delay)

    async def _prepare(self, spec: Manifest, state: ContainerState) -> Launch:
        """Waits until the container can be started; says meanwhile why not."""
        pulls = 0
        while True:
            try:
                image = find_image(self._node.images, spec)
                return await self._build(spec, state, image)
            except ImageProblem as problem:
                await self._image_problem(state, problem, pulls)
                pulls += 1
            except ConfigProblem as problem:
                self._wait_for(state, "CreateContainerConfigError", str(problem))
                await asyncio.sleep(RETRY_SECONDS)

    async def _image_problem(self, state: ContainerState, problem: ImageProblem, pulls: int) -> None:
        self._wait_for(state, problem.reason, str(problem))
        if pulls == 0:
            await self._event("Warning", "Failed", f"Error: {problem.reason}: {problem}")
        if problem.reason != "ErrImagePull":
            await asyncio.sleep(RETRY_SECONDS)
            return
        await asyncio.sleep(self._node.back_off_seconds / 2)
        back_off = f'Back-off pulling image "{state.image}": ErrImagePull: {problem}'
        self._wait_for(state, "ImagePullBackOff", back_off)
        await asyncio.sleep(min(self._node.back_off_seconds * 2**pulls, self._node.back_off_limit_seconds))

    def _wait_for(self, state: ContainerState, reason: str, message: str) -> None:
        if "terminated" in state.state:
            state.last_state = state.state
        state.state = _waiting(reason, message)
        self._dirty.set()

    async def _build(self, spec: Manifest, state: ContainerState, image: Image) -> Launch:
        try:
            env = await environment_of(
                spec, pod=self.pod, fetch=self._fetch, pod_ip=self.ip, host_ip=self._node.address
            )
        except (KubeError, aiohttp.ClientError, TimeoutError) as error:
            raise ConfigProblem(str(error)) from error
        return build_launch(
            container=spec,
            image=image,
            env=env,
            mounts=mounts_of(spec, self._volumes),
            pod_ip=self.ip,
            cwd=self.folder / state.name,
            termination_log=self._termination_log(state),
        )

    def _termination_log(self, state: ContainerState) -> Path:
        return self.folder / state.name / f"termination-log.{state.restart_count}"

    def log_path(self, container: str, *, previous: bool = False) -> Path | None:
        """The file with the output of a container's present (or previous) run; None for an unknown container."""
        for state in (*self._inits, *self._containers):
            if state.name == container:
                running = "running" in state.state or "terminated" in state.state
                run = state.restart_count - (1 if previous else 0)
                if not running and not previous and run > 0 and not self._log(state, run).exists():
                    run -= 1
                return self._log(state, run)
        return None

    def _log(self, state: ContainerState, run: int) -> Path:
        return self.folder / state.name / f"{run}.log"

    async def _run(self, spec: Manifest, state: ContainerState, launch: Launch) -> int:
        container_id = f"process://{self.pod['metadata']['uid']}/{state.name}/{state.restart_count}"
        starting = asyncio.create_task(
            ContainerProcess.start(
                launch,
                container_id=container_id,
                log=self._log(state, state.restart_count),
                termination_log=self._termination_log(state),
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:  # the pod ends at this very moment: its process must not be forgotten
            self._running[state.name] = (await starting, launch)
            raise
        except OSError as error:
            self._wait_for(state, "RunContainerError", str(error))
            await asyncio.sleep(RETRY_SECONDS)
            return 128
        self._running[state.name] = (process, launch)
        if "terminated" in state.state:
            state.last_state = state.state
        state.container_id = container_id
        state.state = {"running": {"startedAt": process.started_at}}
        self._dirty.set()
        await self._event("Normal", "Started", f"Container started: {state.name}")
        prober = asyncio.create_task(self._probe(spec, state, process, launch))
        try:
            code = await process.wait()
        finally:
            prober.cancel()
        self._ended(spec, state, process, code)
        return code

    def _ended(self, spec: Manifest, state: ContainerState, process: ContainerProcess, code: int) -> None:
        self._running.pop(state.name, None)
        state.ready = state.init and code == 0
        state.started = False
        policy = spec.get("terminationMessagePolicy") or "File"
        state.state = {"terminated": process.terminated(code, policy=policy)}
        self._dirty.set()

    async def _probe(self, spec: Manifest, state: ContainerState, process: ContainerProcess, launch: Launch) -> None:
        if state.init:
            state.started = True
            return
        told: set[str] = set()

        def started() -> None:
            state.started = True
            self._dirty.set()

        def ready(holds: bool) -> None:
            state.ready = holds
            self._dirty.set()

        def failure(message: str) -> None:
            if message not in told:
                told.add(message)
                self._aside(self._event("Warning", "Unhealthy", message))

        def kill(message: str) -> None:
            # A task of its own: the prober ends as soon as the container does.
            self._aside(self._kill(spec, process, launch, message))

        async def command(argv: list[str], timeout_seconds: float) -> tuple[bool, str]:
            return await run_to_end(argv, launch=launch, timeout_seconds=timeout_seconds)

        await Prober(
            container=spec,
            address=self.ip,
            session=self._node.probe_session,
            run_command=command,
            fastest=self._node.fastest_probe_seconds,
            on_started=started,
            on_ready=ready,
            on_kill=kill,
            on_failure=failure,
        ).run()

    async def _kill(self, spec: Manifest, process: ContainerProcess, launch: Launch, message: str) -> None:
        await self._event("Normal", "Killing", message)
        await self._stop_container(spec, process, launch, self._grace())

    def _grace(self) -> float:
        seconds = self.pod["spec"].get("terminationGracePeriodSeconds")
        return 30.0 if seconds is None else float(seconds)

    # ---- end --------------------------------------------------------------------------------------------------------

    def terminate(self, grace_seconds: float | None = None) -> asyncio.Task[None]:
        """Begins the pod's end (once); the task is done when its processes are gone and the API server knows."""
        if self._ending is None:
            grace = self._grace() if grace_seconds is None else grace_seconds
            self._ending = asyncio.create_task(self._end(grace))
        return self._ending

    @property
    def ending(self) -> bool:
        return self._ending is not None

    async def kill_now(self) -> None:
        """Ends all processes at once, without telling the API server: the node itself goes away."""
        for task in (self._life, self._publisher, *self._asides, *([self._ending] if self._ending else [])):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for process, _ in list(self._running.values()):
            process.signal(signal.SIGKILL)
        for process, _ in list(self._running.values()):
            await process.wait()

    async def _end(self, grace: float) -> None:
        self._life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._life
        specs = {
            spec["name"]: spec for key in ("initContainers", "containers") for spec in self.pod["spec"].get(key) or ()
        }
        states = {state.name: state for state in (*self._inits, *self._containers)}

        async def stop(name: str, process: ContainerProcess, launch: Launch) -> None:
            code = await self._stop_container(specs[name], process, launch, grace)
            self._ended(specs[name], states[name], process, code)

        async with asyncio.TaskGroup() as group:
            for name, (process, launch) in list(self._running.items()):
                group.create_task(stop(name, process, launch))
        self._publisher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._publisher
        with contextlib.suppress(KubeError, aiohttp.ClientError, TimeoutError, OSError):
            await self._publish_once()
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.pod["metadata"]["uid"]}}
            await self._node.client.request("DELETE", self._path, body=options)

    async def _stop_container(self, spec: Manifest, process: ContainerProcess, launch: Launch, grace: float) -> int:
        """preStop and SIGTERM share the grace, as in the kubelet; SIGKILL comes at its end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        hook = (spec.get("lifecycle") or {}).get("preStop") or {}
        waiting = asyncio.create_task(process.wait())
        before = asyncio.create_task(self._pre_stop(hook, launch, grace))
        try:
            # A container that ends by itself does not sit out its preStop.
            await asyncio.wait({waiting, before}, timeout=max(grace, 0.0), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        finally:
            for task in (waiting, before):
                task.cancel()
            await asyncio.wait({waiting, before})
        return await process.stop(max(deadline - loop.time(), 0.0))

    async def _pre_stop(self, hook: Manifest, launch: Launch, grace: float) -> None:
        if sleep := hook.get("sleep"):
            await asyncio.sleep(float(sleep["seconds"]))
        elif command := hook.get("exec"):
            await run_to_end(list(command["command"]), launch=launch, timeout_seconds=grace)
        elif http := hook.get("httpGet"):
            url = f"http://{self.ip}:{http['port']}{http.get('path') or '/'}"
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._node.probe_session.get(url, timeout=aiohttp.ClientTimeout(total=max(grace, 0.1))):
                    pass


def _waiting(reason: str, message: str | None = None) -> Manifest:
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}
