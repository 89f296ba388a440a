"""HTTP in front of `api`: paths, parameters, content types, watches."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from . import discovery, errors
from .api import APPLY, Api, Call, stamp
from .builtins import Resource
from .errors import ApiError, Json
from .selectors import selector
from .store import Filter
from .table import json_path, partial, table

BOOKMARK_SECONDS = 10.0
NOT_SERVED = "404 page not found\n"
AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def create_app() -> Starlette:
    api = Api()

    async def handle(request: Request) -> Response:
        try:
            return await _dispatch(api, request)
        except ApiError as error:
            warnings = getattr(request.state, "warnings", [])
            return _warned(JSONResponse(error.status(), error.code), warnings)

    return Starlette(routes=[Route("/{path:path}", handle, methods=METHODS)])


async def _dispatch(api: Api, request: Request) -> Response:
    parts = request.url.path.strip("/").split("/")
    served = list(api.resources.values())
    if parts[0] in ("readyz", "healthz", "livez"):
        return PlainTextResponse("ok")
    if request.method == "GET" and (found := _discover(parts, served, request.headers.get("accept", ""))) is not None:
        return JSONResponse(found, media_type=AGGREGATED if found.get("kind") == "APIGroupDiscoveryList" else None)
    if parts[0] == "api" and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        if parts[0] in ("api", "apis") and request.method != "GET":
            raise ApiError(
                405, "MethodNotAllowed", "the server does not allow this method on the requested resource", {}
            )
        return PlainTextResponse(NOT_SERVED, 404)
    if "protobuf" in _media_type(request):
        message = "the body of the request was in an unknown format - accepted media types include: application/json"
        raise ApiError(415, "UnsupportedMediaType", message)
    if rest == ["selfsubjectaccessreviews"] and request.method == "POST":
        return JSONResponse({**await request.json(), "metadata": {}, "status": {"allowed": True}}, 201)
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    resource = api.resources.get((group, version, rest[0]))
    if resource is None or len(rest) > 3 or (namespace and not resource.namespaced):
        return PlainTextResponse(NOT_SERVED, 404)
    body = await _body(request, resource)
    call = _call(request, body)
    if len(rest) == 1:
        return _collection(api, request, resource, namespace, body, call)
    call.subresource = rest[2] if len(rest) > 2 else ""
    return _one(api, request, resource, namespace, rest[1], body, call)


def _discover(parts: list[str], served: list[Resource], accept: str) -> Json | None:
    versions = {
        each.api_version: [other for other in served if other.api_version == each.api_version] for each in served
    }
    groups = {each.group: [other for other in served if other.group == each.group] for each in served if each.group}
    match parts:
        case ["version"]:
            return discovery.VERSION
        case ["api" | "apis"] if "as=APIGroupDiscoveryList" in accept:
            return discovery.aggregated([each for each in served if bool(each.group) == (parts[0] == "apis")])
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            listed = [discovery.group(name, resources) for name, resources in groups.items()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        case ["apis", name] if name in groups:
            return discovery.group(name, groups[name])
        case ["api", version] if version in versions:
            return discovery.resource_list(versions[version])
        case ["apis", name, version] if f"{name}/{version}" in versions:
            return discovery.resource_list(versions[f"{name}/{version}"])
        case ["openapi", "v3"]:
            names = [f"apis/{each}" if "/" in each else f"api/{each}" for each in versions]
            return {"paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in names}}
        case ["openapi", "v3", _, *rest] if "/".join(rest) in versions:
            return discovery.openapi(versions["/".join(rest)])
    return None


async def _body(request: Request, resource: Resource) -> Any:
    raw = await request.body()
    if not raw or request.method == "GET":
        return {}
    try:
        return yaml.safe_load(raw) if _media_type(request) == APPLY else json.loads(raw)
    except (ValueError, yaml.YAMLError) as error:
        raise errors.bad_request(
            f"the object provided is unrecognized (must be of type {resource.kind}): {error}"
        ) from error


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0]


def _call(request: Request, body: Any) -> Call:
    query = request.query_params
    manager = query.get("fieldManager")
    if request.method == "PATCH" and _media_type(request) == APPLY and not manager:
        cause = errors.Cause("FieldValueRequired", "fieldManager", "Required value: is required for apply patch")
        raise errors.invalid("", [cause], group="meta.k8s.io", kind="PatchOptions")
    validation = query.get("fieldValidation", "Warn")
    call = Call(
        manager=manager or request.headers.get("user-agent", "unknown").split("/")[0],
        dry_run=query.get("dryRun") == "All" or (isinstance(body, dict) and body.get("dryRun") == ["All"]),
        strict=validation == "Strict",
        ignore=validation == "Ignore",
        force=query.get("force") == "true",
    )
    request.state.warnings = call.warnings
    return call


def _warned(response: Response, warnings: list[str]) -> Response:
    for warning in warnings:
        response.headers.append("Warning", f"299 - {json.dumps(warning)}")
    return response


def _shown(request: Request, resource: Resource, item: Json, code: int, call: Call) -> Response:
    accept = request.headers.get("accept", "")
    if item["kind"] == resource.kind and "as=Table" in accept:
        include = request.query_params.get("includeObject")
        item = table(resource, [item], item["metadata"]["resourceVersion"], include)
    elif item["kind"] == resource.kind and "as=PartialObjectMetadata" in accept:
        item = partial(item)
    return _warned(JSONResponse(item, code), call.warnings)


def _collection(api: Api, request: Request, resource: Resource, namespace: str, body: Any, call: Call) -> Response:
    query = request.query_params
    if request.method == "POST":
        return _shown(request, resource, api.create(resource, namespace, body, call), 201, call)
    wanted = selector(resource, query.get("labelSelector", ""), query.get("fieldSelector", ""))
    if request.method == "GET" and query.get("watch") in ("true", "1"):
        return _watch(api, request, resource, namespace, wanted)
    items = [item for item in api.store.list(resource, namespace or None) if wanted(item)]
    if request.method == "DELETE":
        for item in items:
            api.delete(resource, item["metadata"].get("namespace", ""), item["metadata"]["name"], body, call)
        return JSONResponse(_list(resource, items, {"resourceVersion": str(api.store.version)}))
    if request.method != "GET":
        raise errors.not_allowed()
    return _listed(request, resource, items, str(api.store.version))


def _listed(request: Request, resource: Resource, items: list[Json], version: str) -> Response:
    query, accept = request.query_params, request.headers.get("accept", "")
    metadata: Json = {"resourceVersion": version}
    start, limit = _continued(query.get("continue", "")), int(query.get("limit") or 0)
    left = len(items) - start - limit
    items = items[start : start + limit] if limit else items[start:]
    if limit and left > 0:
        metadata |= {
            "continue": base64.urlsafe_b64encode(f"{start + limit}".encode()).decode(),
            "remainingItemCount": left,
        }
    if "as=Table" in accept:
        shown = table(resource, items, version, query.get("includeObject"))
        return JSONResponse({**shown, "metadata": metadata})
    if "as=PartialObjectMetadata" in accept:
        listed = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
        return JSONResponse({**listed, "items": [partial(item) for item in items]})
    return JSONResponse(_list(resource, items, metadata))


def _list(resource: Resource, items: list[Json], metadata: Json) -> Json:
    if resource.custom:
        metadata = {"continue": "", **metadata}
    else:  # typed lists do not repeat the kind
        items = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in items]
    return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": metadata, "items": items}


def _continued(token: str) -> int:
    try:
        return int(base64.urlsafe_b64decode(token)) if token else 0
    except (binascii.Error, ValueError) as error:
        raise errors.bad_request(f"invalid continue token: continue key is not valid: {token}") from error


def _one(api: Api, request: Request, resource: Resource, namespace: str, name: str, body: Any, call: Call) -> Response:
    code, method, subresource = 200, request.method, call.subresource
    if resource.kind == "Pod" and subresource in ("binding", "eviction") and method == "POST":
        item = _bind(api, resource, namespace, name, body, call) if subresource == "binding" else None
        return JSONResponse(item or api.delete(resource, namespace, name, body.get("deleteOptions") or {}, call), 201)
    if subresource and subresource not in resource.subresources:
        return PlainTextResponse(NOT_SERVED, 404)
    if subresource == "scale" and method != "DELETE":
        return JSONResponse(_scale(api, request, resource, namespace, name, body, call))
    if method == "GET":
        item = api.get(resource, namespace, name)
    elif method == "PUT":
        item = api.replace(resource, namespace, name, body, call)
    elif method == "PATCH":
        code, item = api.patch(resource, namespace, name, _media_type(request), body, call)
    elif method == "DELETE" and not subresource:
        query = request.query_params
        seconds = {"gracePeriodSeconds": int(query["gracePeriodSeconds"])} if "gracePeriodSeconds" in query else {}
        policy = {"propagationPolicy": query["propagationPolicy"]} if "propagationPolicy" in query else {}
        item = api.delete(resource, namespace, name, {**seconds, **policy, **body}, call)
    else:
        raise errors.not_allowed()
    return _shown(request, resource, item, code, call)


def _bind(api: Api, resource: Resource, namespace: str, name: str, body: Json, call: Call) -> Json:
    pod = api.get(resource, namespace, name)
    if pod["spec"].get("nodeName"):
        why = f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"'
        raise errors.conflict(resource, name, why, "pods/binding")
    pod["spec"]["nodeName"] = body["target"]["name"]
    scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": stamp()}
    others = [each for each in pod["status"].get("conditions", []) if each["type"] != "PodScheduled"]
    pod["status"]["conditions"] = [*others, scheduled]
    if not call.dry_run:
        api.store.put(resource, pod)
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def _scale(api: Api, request: Request, resource: Resource, namespace: str, name: str, body: Any, call: Call) -> Json:
    item, paths = api.get(resource, namespace, name), resource.scale_paths
    if request.method != "GET":
        wanted = body.get("spec", {}).get("replicas", 0)
        steps = paths["specReplicasPath"].strip(".").split(".")
        new = json.loads(json.dumps(item))
        node = new
        for step in steps[:-1]:
            node = node.setdefault(step, {})
        node[steps[-1]] = wanted
        if "resourceVersion" in body.get("metadata", {}):
            new["metadata"]["resourceVersion"] = body["metadata"]["resourceVersion"]
        item = api.update(resource, item, new, call)
    selected = json_path(item, paths["labelSelectorPath"]) if "labelSelectorPath" in paths else None
    if not resource.custom:
        labels = item["spec"].get("selector", {}).get("matchLabels", {})
        selected = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    status = {"replicas": json_path(item, paths["statusReplicasPath"]) or 0}
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: item["metadata"][key] for key in kept if key in item["metadata"]},
        "spec": {"replicas": replicas} if (replicas := json_path(item, paths["specReplicasPath"])) else {},
        "status": {**status, "selector": selected} if selected else status,
    }


def _watch(api: Api, request: Request, resource: Resource, namespace: str, wanted: Filter) -> Response:
    query = request.query_params
    version, accept = query.get("resourceVersion", ""), request.headers.get("accept", "")
    if version and not version.isdigit():
        message = f'resourceVersion: Invalid value: "{version}": strconv.ParseUint: parsing "{version}": invalid syntax'
        raise ApiError(500, None, message)
    whole = query.get("sendInitialEvents") == "true"
    fresh = whole or version in ("", "0")
    after = api.store.version if fresh else int(version)
    initial = [item for item in api.store.list(resource, namespace or None) if fresh and wanted(item)]
    queue = api.store.watch(resource, after)
    ends = time.monotonic() + float(query.get("timeoutSeconds") or 3600)
    bookmarks = query.get("allowWatchBookmarks") == "true"

    def line(event: Json, first: bool = False) -> str:
        item = event["object"]
        if item["kind"] == resource.kind and "as=Table" in accept:
            item = table(
                resource, [item], item["metadata"]["resourceVersion"], query.get("includeObject"), headers=first
            )
        elif item["kind"] == resource.kind and "as=PartialObjectMetadata" in accept:
            item = partial(item)
        return json.dumps({**event, "object": item}) + "\n"

    def bookmark(annotations: Json | None = None) -> str:
        metadata = {"resourceVersion": str(api.store.version), "creationTimestamp": None, **(annotations or {})}
        item = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        return json.dumps({"type": "BOOKMARK", "object": item}) + "\n"

    def here(item: Json) -> bool:
        return wanted(item) and (not namespace or item["metadata"].get("namespace") == namespace)

    async def events() -> AsyncIterator[str]:
        try:
            if after < api.store.oldest(resource):
                expired = ApiError(410, "Expired", f"too old resource version: {after} ({api.store.oldest(resource)})")
                yield json.dumps({"type": "ERROR", "object": expired.status()}) + "\n"
                return
            first = True
            for item in initial:
                yield line({"type": "ADDED", "object": item}, first)
                first = False
            if whole and bookmarks:
                yield bookmark({"annotations": {"k8s.io/initial-events-end": "true"}})
            while (left := ends - time.monotonic()) > 0:
                change = None
                with contextlib.suppress(TimeoutError):
                    change = await asyncio.wait_for(queue.get(), min(left, BOOKMARK_SECONDS))
                event = change.event(here) if change else None
                if event is not None:
                    yield line(event, first)
                    first = False
                elif change is None and bookmarks:
                    yield bookmark()
        finally:
            api.store.unwatch(resource, queue)

    return StreamingResponse(events(), media_type="application/json")
