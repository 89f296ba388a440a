"""The kinds that are served: by the models of the Kubernetes client with builtins.yaml, or by a definition."""

import base64
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from kubernetes.client import models

from .errors import Json
from .schema import PRESERVE


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One kind as it is served; builtins.yaml says what the fields mean. `schema` is structural and knows metadata."""

    kind: str
    plural: str
    singular: str
    schema: Json
    group: str = ""
    version: str = "v1"
    namespaced: bool = True
    short_names: Sequence[str] = ()
    categories: Sequence[str] = ()
    subresources: Sequence[str] = ("status",)
    scale_paths: Json = field(default_factory=dict)
    columns: Sequence[Json] = ()
    selectable: Sequence[str] = ()
    custom: bool = False
    generation: bool = False
    seed: Json = field(default_factory=dict)
    admitted: Json = field(default_factory=dict)
    since: int = 0  # changes before this version cannot be watched

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


_DATA: Json = yaml.safe_load((Path(__file__).parent / "builtins.yaml").read_text())
_addresses = iter(range(2, 65000))
_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


@functools.cache
def model_schema(name: str) -> Json:
    """The structural schema of a type as the client knows it: `V1PodSpec`, `List[str]`, `Dict[str, str]`, `object`."""
    known: Json = _DATA["schemas"].get(name, {})
    if inner := re.fullmatch(r"List\[(.*)]", name):
        return {"type": "array", "items": model_schema(inner[1]), **known}
    if inner := re.fullmatch(r"Dict\[str, (.*)]", name):
        return {"type": "object", "additionalProperties": model_schema(inner[1]), **known}
    if PRESERVE in known or not hasattr(models, name):
        return known
    model, properties, defaults = getattr(models, name), {}, _DATA["defaults"].get(name, {})
    for attribute, kind in model.openapi_types.items():
        found = {**model_schema(kind), **_DATA["schemas"].get(f"{name}.{attribute}", {})}
        if attribute in defaults:
            found |= {"default": defaults[attribute], "nullable": defaults[attribute] is None}
        properties[model.attribute_map[attribute]] = found
    required = [model.attribute_map[each] for each, about in model.model_fields.items() if about.is_required()]
    return {"type": "object", "properties": properties, **({"required": required} if required else {}), **known}


def _rooted(schema: Json) -> Json:
    metadata = {**model_schema("V1ObjectMeta"), "required": ["name"]}
    root = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": metadata}
    return {**schema, "properties": {**schema.get("properties", {}), **root}}


def builtin_resources() -> Iterator[Resource]:
    """The kinds of builtins.yaml."""
    for model, about in _DATA["kinds"].items():
        kind, schema = re.sub(r"^(Core)?V[12]", "", model), _rooted(model_schema(model))
        seed, columns = {**_DATA["seed"], **about.get("seed", {})}, [*about.get("columns", ()), _AGE]
        known = {"kind": kind, "singular": kind.lower(), "schema": schema, "seed": seed, "columns": columns}
        yield Resource(**{**about, **known})


def custom_resource(definition: Json, *, since: int) -> Resource:
    """What a CustomResourceDefinition declares. `since`: the version from which it can be watched, when it is new."""
    spec, names = definition["spec"], definition["spec"]["names"]
    version = next(each for each in spec["versions"] if each["storage"])
    below, kind = version.get("subresources", {}), names["kind"]
    about = {"group": spec["group"], "version": version["name"], "namespaced": spec["scope"] == "Namespaced"}
    about |= {"kind": kind, "plural": names["plural"], "singular": names.get("singular", kind.lower())}
    about |= {"short_names": names.get("shortNames", ()), "categories": names.get("categories", ())}
    about |= {"subresources": tuple(below), "scale_paths": below.get("scale", {}), "seed": {"metadata": {}}}
    about |= {"columns": version.get("additionalPrinterColumns", [_AGE]), "custom": True, "generation": True}
    about |= {"since": int(definition["metadata"].get("resourceVersion", since))}
    return Resource(schema=_rooted(version["schema"]["openAPIV3Schema"]), **about)


def prepare(resource: Resource, new: Json, old: Json | None) -> None:
    """What the real server fills in on a write beyond defaults, in place."""
    if resource.kind == "Pod":
        new["spec"].setdefault("enableServiceLinks", True)
    elif resource.kind == "Service" and old is not None:
        kept = ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy")
        new["spec"] = {**{key: old["spec"][key] for key in kept if key in old["spec"]}, **new["spec"]}
    elif resource.kind == "Secret":
        given = {key: base64.b64encode(text.encode()).decode() for key, text in new.pop("stringData", {}).items()}
        new |= {"data": {**new.get("data", {}), **given}} if given else {}


def admit(resource: Resource, new: Json) -> None:
    """What a new object gets after field managers have been reckoned, so that nobody owns it; in place."""
    if resource.kind == "Service" and new["spec"]["type"] != "ExternalName":
        number = next(_addresses)
        address = new["spec"].setdefault("clusterIP", f"10.96.{number // 250}.{number % 250 + 1}")
        new["spec"] |= {"clusterIPs": [address], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"}
