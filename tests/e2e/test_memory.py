"""Memory that runs out, from the engine's allocation to the status: nothing of it is made up."""

from __future__ import annotations

from tests.e2e.site import Site

TOO_MANY_BLOCKS = 10**13
"""More KV cache than a process can address: its allocation fails on any machine."""


def test_a_share_that_does_not_help_goes_down_to_the_floor_and_then_needs_a_person(site: Site) -> None:
    spec = {
        "memory": {"floor": 0.82},
        "runtime": {
            "extraArgs": [f"--num-gpu-blocks-override={TOO_MANY_BLOCKS}"],
            "resources": {"requests": {"memory": "256Mi"}, "limits": {"memory": "4Gi"}},
        },
    }
    with site.deployed("greedy", spec) as service:
        message = service.wait_condition("MemoryTuned", "True", "FloorReached")
        assert "Lowered from 0.9 in 2 steps" in message
        message = service.wait_condition("Stalled", "True", "OutOfMemory")
        assert "memory=host phase=kv-cache" in message
        assert "spec.memory.utilization went down to 0.82" in message
        memory = service.status()["memory"]
        assert (memory["steps"], memory["effective"]) == (2, 0.82)
        assert memory["lastOutOfMemory"]["podUID"]
        (container,) = service.deployment()["spec"]["template"]["spec"]["containers"]
        args = container["args"]
        assert args[args.index("--gpu-memory-utilization") + 1] == "0.82"
        events = service.kubectl.list("events")
        steps = [event for event in events if event.get("action") == "MemoryTuned"]
        ours = [event["reason"] for event in steps if event["involvedObject"]["name"] == "greedy"]
        assert sorted(ours) == ["FloorReached", "LoweredAfterOutOfMemory"]
