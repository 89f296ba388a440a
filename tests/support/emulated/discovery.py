"""What clients read before they write: groups, resources, versions, OpenAPI as far as kubectl needs it."""

from __future__ import annotations

from .builtins import Resource
from .errors import Json

VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.2+emulated", "platform": "emulated"}
_VERBS = ["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"]


def _named(resource: Resource, *, verbs: str) -> Json:
    extra = {"shortNames": list(resource.short_names), "categories": list(resource.categories)}
    about = {"name": resource.plural, "singularName": resource.singular, "namespaced": resource.namespaced}
    return {**about, "kind": resource.kind, verbs: _VERBS, **{key: value for key, value in extra.items() if value}}


def resource_list(resources: list[Resource]) -> Json:
    """APIResourceList of one group and version."""
    listed: list[Json] = []
    for each in resources:
        listed.append(_named(each, verbs="verbs"))
        for name in sorted(each.subresources, reverse=True):
            about: Json = {"name": f"{each.plural}/{name}", "singularName": "", "namespaced": each.namespaced}
            if name == "scale":
                about |= {"group": "autoscaling", "version": "v1", "kind": "Scale"}
            listed.append(
                {**about, **({} if name == "scale" else {"kind": each.kind}), "verbs": ["get", "patch", "update"]}
            )
    version = resources[0].api_version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": listed}


def group(name: str, resources: list[Resource]) -> Json:
    versions = [
        {"groupVersion": each, "version": each.split("/")[1]} for each in sorted({r.api_version for r in resources})
    ]
    return {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": versions, "preferredVersion": versions[0]}


def aggregated(resources: list[Resource]) -> Json:
    """APIGroupDiscoveryList: everything in one answer."""
    groups: dict[tuple[str, str], list[Json]] = {}
    for each in resources:
        kind = {"group": each.group, "version": each.version, "kind": each.kind}
        about = {**_named(each, verbs="verbs"), "resource": each.plural, "responseKind": kind}
        del about["name"], about["namespaced"], about["kind"]
        about["singularResource"] = about.pop("singularName")
        about["scope"] = "Namespaced" if each.namespaced else "Cluster"
        about["subresources"] = [
            {
                "subresource": name,
                "responseKind": {"group": "autoscaling", "version": "v1", "kind": "Scale"} if name == "scale" else kind,
                "verbs": ["get", "patch", "update"],
            }
            for name in sorted(each.subresources)
        ]
        groups.setdefault((each.group, each.version), []).append(about)
    items = [
        {
            "metadata": {"name": name} if name else {"name": None},
            "versions": [{"version": version, "resources": listed, "freshness": "Current"}],
        }
        for (name, version), listed in groups.items()
    ]
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}


def openapi(resources: list[Resource]) -> Json:
    """OpenAPI v3 of one group and version: that PATCH knows dryRun and fieldValidation, and the custom schemas.

    Built-in schemas are left out: kubectl has their types compiled in.
    """
    schemas: Json = {}
    paths: Json = {}
    for each in resources:
        kind = {"group": each.group, "version": each.version, "kind": each.kind}
        names = ("dryRun", "fieldValidation", "fieldManager", "force")
        parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]
        prefix = f"/apis/{each.api_version}" if each.group else "/api/v1"
        where = (
            f"{prefix}/namespaces/{{namespace}}/{each.plural}/{{name}}"
            if each.namespaced
            else f"{prefix}/{each.plural}/{{name}}"
        )
        operation = {
            "x-kubernetes-group-version-kind": kind,
            "x-kubernetes-action": "patch",
            "parameters": parameters,
            "responses": {},
        }
        paths[where] = {"patch": operation}
        if each.custom:
            key = ".".join([*reversed(each.group.split(".")), each.version, each.kind])
            schemas[key] = {**each.schema, "x-kubernetes-group-version-kind": [kind]}
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
        "paths": paths,
        "components": {"schemas": schemas},
    }
