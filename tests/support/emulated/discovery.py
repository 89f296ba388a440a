"""What clients read before they write: groups, resources, versions, OpenAPI as far as kubectl needs it."""

from .builtins import Resource
from .errors import Json

VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.2+emulated", "platform": "emulated"}
_VERBS = ["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"]


def discover(parts: list[str], served: list[Resource]) -> Json | None:
    """The answer to a GET that is not about objects, or None."""
    versions: dict[str, list[Resource]] = {}
    for each in served:
        versions.setdefault(each.api_version, []).append(each)
    groups = {version.split("/")[0]: version for version in versions if "/" in version}
    match parts:
        case ["version"]:
            return VERSION
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            versioned = {name: {"groupVersion": each, "version": each.split("/")[1]} for name, each in groups.items()}
            listed = [{"name": k, "versions": [each], "preferredVersion": each} for k, each in versioned.items()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        case ["api" | "apis", *rest] if "/".join(rest) in versions:
            listed = [about for each in versions["/".join(rest)] for about in _resource(each)]
            about = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "/".join(rest)}
            return {**about, "resources": listed}
        case ["openapi", "v3"]:
            names = [f"apis/{each}" if "/" in each else f"api/{each}" for each in versions]
            return {"paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in names}}
        case ["openapi", "v3", prefix, *rest] if "/".join(rest) in versions:
            return _openapi(f"/{prefix}/{'/'.join(rest)}", versions["/".join(rest)])
    return None


def _resource(each: Resource) -> list[Json]:
    """A kind and its subresources."""
    about: Json = {"name": each.plural, "namespaced": each.namespaced, "kind": each.kind, "verbs": _VERBS}
    extra = {"shortNames": list(each.short_names), "categories": list(each.categories)}
    listed = [{**about, "singularName": each.singular, **{key: value for key, value in extra.items() if value}}]
    about |= {"verbs": ["get", "patch", "update"], "singularName": ""}
    for name in sorted(each.subresources, reverse=True):
        scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"} if name == "scale" else {}
        listed.append({**about, "name": f"{each.plural}/{name}", **scale})
    return listed


def _openapi(prefix: str, resources: list[Resource]) -> Json:
    """OpenAPI v3 of one version: that PATCH knows dryRun and others, and custom schemas; kubectl knows other kinds."""
    schemas, paths = {}, {}
    parameters = [{"name": name, "in": "query"} for name in ("dryRun", "fieldValidation", "fieldManager", "force")]
    for each in resources:
        kind = {"group": each.group, "version": each.version, "kind": each.kind}
        about = {"x-kubernetes-group-version-kind": kind, "x-kubernetes-action": "patch", "parameters": parameters}
        where = "/namespaces/{namespace}" if each.namespaced else ""
        paths[f"{prefix}{where}/{each.plural}/{{name}}"] = {"patch": {**about, "responses": {}}}
        if each.custom:
            schemas[each.kind] = {**each.schema, "x-kubernetes-group-version-kind": [kind]}
    return {"openapi": "3.0.0", "info": VERSION, "paths": paths, "components": {"schemas": schemas}}
