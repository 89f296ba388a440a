"""spec.accelerator: which combinations are refused and why; parts of a device; Volcano."""

from __future__ import annotations

from typing import Any

import pytest

from reprise_operator.children.profiles import PROFILES
from reprise_operator.spec import SpecError, parse
from tests.support.factories import body, container, merged, planned

VLLM = {"runtime": {"name": "vllm-ascend"}, "model": {"maxModelLen": 4096}}


def limits(quantities: dict[str, Any], *, profile: str, count: int | None = None, **more: Any) -> dict[str, Any]:
    accelerator = {"profile": profile} if count is None else {"profile": profile, "count": count}
    return {"accelerator": accelerator, "runtime": {"resources": {"limits": quantities}}, **more}


SOFT: dict[str, Any] = {"podTemplate": {"metadata": {"annotations": {"huawei.com/vnpu-mode": "hami-core"}}}}
"""HAMi's, of pods whose part is kept by a library in the container, and not by the driver."""


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"accelerator": {"profile": "h100"}}, "it must be one of cpu, ascend910"),
        ({"accelerator": {"resourceName": "nvidia.com/gpu"}}, "which is no Ascend NPU"),
        (
            {"accelerator": {"resourceName": "huawei.com/Ascend310P"}},
            "a 310P, and spec.accelerator.profile is ascend910",
        ),
        ({"accelerator": {"resourceName": "huawei.com/Ascend310"}}, "there is none"),
        (
            {"accelerator": {"profile": "ascend310p", "resourceName": "huawei.com/Ascend910"}},
            "choose a profile of that chip (ascend910, ascend910b",
        ),
        (
            merged(VLLM, {"accelerator": {"resourceName": "huawei.com/Ascend910-16c", "count": 2}}),
            "parts cannot compute together",
        ),
        (merged(VLLM, {"accelerator": {"profile": "ascend910c", "count": 1}}), "set a multiple of 2"),
        (merged(VLLM, {"accelerator": {"profile": "hami-ascend910c", "count": 3}}), "set a multiple of 2"),
        (
            {"accelerator": {"profile": "ascend310p"}, "model": {"dtype": "bfloat16"}},
            "spec.model.dtype is bfloat16; a 310P computes in float16 only",
        ),
        (limits({"huawei.com/Ascend910": 4}, profile="ascend910"), "use spec.accelerator.count"),
        (limits({"huawei.com/Ascend310P": 1}, profile="ascend910"), "beside huawei.com/Ascend910"),
        (limits({"huawei.com/Ascend910": 1}, profile="cpu"), "the engine would hold and not use"),
        (limits({"huawei.com/Ascend910-memory": 1024}, profile="ascend910"), "beside huawei.com/Ascend910"),
        (limits({"huawei.com/Ascend910B4-memory": 65_537}, profile="hami-ascend910b4"), "the device has 65536 MiB"),
        (limits({"huawei.com/Ascend910B4-memory": "lots"}, profile="hami-ascend910b4"), "'lots' is not a quantity"),
        (
            limits(
                {"huawei.com/Ascend910B4-memory": 16_384},
                profile="hami-ascend910b4",
                memory={"utilization": 0.6},
                **SOFT,
            ),
            "set it to at most 0.5",
        ),
        (
            limits(
                {"huawei.com/Ascend910B3-memory": 65_536},
                profile="hami-ascend910b3",
                count=2,
                memory={"utilization": 0.6},
                **SOFT,
            ),
            "is 65536 of 131072 MiB: set it to at most 0.5",
        ),
        (
            limits({"huawei.com/Ascend910B3-memory": 131_073}, profile="hami-ascend910b3", count=2, **SOFT),
            "the 2 devices have 131072 MiB",
        ),
        # What HAMi's webhook refuses (HAMi, pkg/device/ascend/device.go, MutateAdmission, 4707fb02).
        (
            limits({"huawei.com/Ascend910B3-memory": 32_768}, profile="hami-ascend910b3", count=2),
            "huawei.com/vnpu-mode: hami-core",
        ),
        (
            limits({"huawei.com/Ascend910C-memory": 32_768}, profile="hami-ascend910c"),
            "huawei.com/vnpu-mode: hami-core",
        ),
        (
            limits({"huawei.com/Ascend910B3-core": 50}, profile="hami-ascend910b3"),
            "huawei.com/vnpu-mode: hami-core",
        ),
    ],
)
def test_a_wrong_combination_is_refused_with_the_reason(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(body(spec))
    assert refused.value.reason == "InvalidSpec"
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("accelerator", "resource", "count"),
    [
        ({"resourceName": "huawei.com/Ascend910-8c"}, "huawei.com/Ascend910-8c", "1"),
        ({"profile": "ascend910c", "resourceName": "huawei.com/Ascend910-8c"}, "huawei.com/Ascend910-8c", "1"),
        (
            {"profile": "ascend310p", "resourceName": "huawei.com/Ascend310P-4c.3cpu"},
            "huawei.com/Ascend310P-4c.3cpu",
            "1",
        ),
        ({"resourceName": "huawei.com/npu"}, "huawei.com/npu", "1"),
        ({"resourceName": "example.com/pooled-npu"}, "example.com/pooled-npu", "1"),
        ({"profile": "cce-ascend910c"}, "huawei.com/ascend-1980", "2"),
    ],
)
def test_names_of_other_device_plugins(accelerator: dict[str, Any], resource: str, count: str) -> None:
    asked = container(planned({"accelerator": accelerator}))["resources"]
    assert asked == {"requests": {resource: count}, "limits": {resource: count}}


def test_dtype_auto_on_a_310p_is_the_one_it_has() -> None:
    args = container(planned({"accelerator": {"profile": "cce-ascend310p"}, "model": {"dtype": "auto"}}))["args"]
    assert args[args.index("--dtype") + 1] == "float16"


@pytest.mark.parametrize(
    ("mib", "effective"),
    [(16_384, 0.5), ("8192", 0.25), (32_768, 0.9), (31_000, 0.9), (10_000, 0.3051), (49_152, 0.75)],
)
@pytest.mark.parametrize("soft", [False, True])
def test_a_part_of_a_device_lowers_the_share(mib: int | str, effective: float, soft: bool) -> None:
    asked: dict[str, Any] = {"huawei.com/Ascend910B4-memory": mib}
    if soft:
        asked["huawei.com/Ascend910B4-core"] = 50
    made = planned(limits(asked, profile="hami-ascend910b4", **(SOFT if soft else {})))
    assert made.memory.effective == effective
    assert made.memory.requested is None
    args = container(made)["args"]
    assert args[args.index("--gpu-memory-utilization") + 1] == f"{effective:g}"
    assert ("huawei.com/Ascend910B4-memory" in made.memory.reason) is (effective < 0.9)


def test_of_several_devices_the_part_is_their_sum() -> None:
    """ascend-device-plugin, docs/hami.md (ed35e1c): two cards of 64 GiB, of which 65,536 MiB together, are a half."""
    asked = {"huawei.com/Ascend910B3-memory": 65_536}
    assert planned(limits(asked, profile="hami-ascend910b3", count=2, **SOFT)).memory.effective == 0.5
    assert planned(limits(asked, profile="hami-ascend910b3", count=1, **SOFT)).memory.effective == 0.9
    assert planned(limits(asked, profile="hami-ascend910b3", count=2)).memory.effective == 0.9, "whole ones"
    eight = limits({"huawei.com/Ascend910B4-memory": 131_072}, profile="hami-ascend910b4", count=8, **SOFT)
    assert planned(eight).memory.effective == 0.5, "of 32 GiB each"


def test_a_share_within_the_part_is_kept() -> None:
    spec = limits({"huawei.com/Ascend310P-memory": 12_288}, profile="hami-ascend310p", memory={"utilization": 0.5})
    assert planned(spec).memory.effective == 0.5


def test_of_a_part_by_template_the_user_knows_how_much_the_engine_sees() -> None:
    """It is a device of its own to the driver, and may say that it has no more memory than that."""
    spec = limits({"huawei.com/Ascend910B4-memory": 16_384}, profile="hami-ascend910b4", memory={"utilization": 0.85})
    assert planned(spec).memory.effective == 0.85


@pytest.mark.parametrize(
    ("profile", "scheduler", "label"),
    [
        ("ascend910b", "volcano", "ascend-910b"),
        ("ascend910c", "volcano", "ascend-910b"),
        ("ascend910b", None, None),
        ("ascend910", "volcano", None),
        ("hami-ascend910b3", "volcano", None),
    ],
)
def test_volcano_is_told_the_kind_of_server(profile: str, scheduler: str | None, label: str | None) -> None:
    template = {} if scheduler is None else {"schedulerName": scheduler}
    pod = planned({"accelerator": {"profile": profile}, "podTemplate": template}).workload["spec"]["template"]
    assert pod["metadata"]["labels"].get("ring-controller.atlas") == label
    assert pod["spec"].get("schedulerName") == scheduler


def test_the_users_own_label_for_volcano_stands() -> None:
    mine = {
        "schedulerName": "volcano",
        "metadata": {"labels": {"ring-controller.atlas": "mine", "fault-scheduling": "grace"}},
    }
    labels = planned({"accelerator": {"profile": "ascend910b"}, "podTemplate": mine}).workload["spec"]["template"][
        "metadata"
    ]["labels"]
    assert (labels["ring-controller.atlas"], labels["fault-scheduling"]) == ("mine", "grace")


POLICY = "huawei.com/schedule_policy"


@pytest.mark.parametrize(
    ("accelerator", "template", "policy"),
    [
        ({"profile": "ascend910b"}, {"schedulerName": "volcano"}, "chip8-node8"),
        ({"profile": "ascend910c"}, {"schedulerName": "volcano"}, "chip2-node16"),
        ({"profile": "ascend910c"}, {}, None),
        ({"profile": "ascend910"}, {"schedulerName": "volcano"}, None),
        ({"profile": "ascend910b", "resourceName": "huawei.com/Ascend910-8c"}, {"schedulerName": "volcano"}, None),
        # What the user says of the server decides.
        (
            {"profile": "ascend910b"},
            {"schedulerName": "volcano", "nodeSelector": {"accelerator-type": "module-910b-16"}},
            None,
        ),
        (
            {"profile": "ascend910c"},
            {"schedulerName": "volcano", "metadata": {"annotations": {"sp-block": "2"}}},
            None,
        ),
        (
            {"profile": "ascend910c"},
            {"schedulerName": "volcano", "metadata": {"annotations": {POLICY: "chip2-node8-sp"}}},
            "chip2-node8-sp",
        ),
    ],
)
def test_volcano_is_told_how_chips_go_together(
    accelerator: dict[str, Any], template: dict[str, Any], policy: str | None
) -> None:
    """Else it takes them for a 910A's: at most eight to a server, a ring of four after the other (mind-cluster,
    ascend-for-volcano, internal/npu/factory.go, get910CardHandlerName, 22bb3d98)."""
    pod = planned({"accelerator": accelerator, "podTemplate": template}).workload["spec"]["template"]
    assert pod["metadata"].get("annotations", {}).get(POLICY) == policy


def test_every_chip_is_known_to_every_device_plugin() -> None:
    plugins = {"mindcluster": "", "cce": "cce-", "hami": "hami-"}
    for prefix in plugins.values():
        names = [name for name in PROFILES if name.startswith(prefix) and (prefix or "-" not in name)]
        for chip in ("910b", "910c", "310p"):
            assert [name for name in names if chip in name], f"{prefix} lacks a profile of {chip}"
