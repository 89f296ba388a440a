"""HTTP in front of `api`: paths, parameters, content types, watches."""

import asyncio
import contextlib
import copy
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from .api import APPLY, Api, Call, stamp
from .discovery import discover
from .errors import ApiError, Json, refusal
from .store import Filter
from .views import json_path, partial, selector, table


def create_app() -> Starlette:
    api = Api()

    async def handle(request: Request) -> Response:
        try:
            return await _dispatch(api, request)
        except ApiError as error:
            return JSONResponse(error.status, error.code)

    return Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])])


async def _dispatch(api: Api, request: Request) -> Response:
    parts, query = request.url.path.strip("/").split("/"), request.query_params
    if parts[0] in ("readyz", "healthz", "livez"):
        return PlainTextResponse("ok")
    if request.method == "GET" and (found := discover(parts, list(api.resources.values()))) is not None:
        return JSONResponse(found)
    namespace, parts = "", parts if parts[0] == "apis" else ["", "", *parts[1:]]
    if parts[3:4] == ["namespaces"] and len(parts) > 5 and parts[5] != "status":
        namespace, parts = parts[4], [*parts[:3], *parts[5:]]
    _, group, version, plural, name, subresource = (*parts, "", "", "", "")[:6]
    resource = api.resources.get((group, version, plural))
    if resource is None or (subresource and subresource not in resource.subresources):
        return PlainTextResponse("404 page not found\n", 404)
    raw, media_type = await request.body(), request.headers.get("content-type", "").split(";")[0]
    try:
        body = yaml.safe_load(raw) if media_type == APPLY else json.loads(raw or "{}")
    except (ValueError, yaml.YAMLError) as error:
        raise refusal("Body", resource, problem=error) from error
    if media_type == APPLY and not query.get("fieldManager"):
        raise refusal("Manager")
    call = Call(resource, namespace, name, subresource)
    call.manager = query.get("fieldManager") or request.headers.get("user-agent", "unknown").split("/")[0]
    call.dry_run = query.get("dryRun") == "All" or (isinstance(body, dict) and body.get("dryRun") == ["All"])
    call.strict, call.force = query.get("fieldValidation") == "Strict", query.get("force") == "true"
    return _one(api, request, call, media_type, body) if name else _collection(api, request, call, body)


def _shown(request: Request, call: Call, item: Json, *, headers: bool = True) -> Json:
    """The object as the client wants it: a Table, its metadata, or as it is."""
    accept, include = request.headers.get("accept", ""), request.query_params.get("includeObject")
    if item["kind"] == call.resource.kind and "as=Table" in accept:
        return table(call.resource, [item], include, headers=headers)
    return partial(item) if item["kind"] == call.resource.kind and "as=PartialObjectMetadata" in accept else item


def _answer(request: Request, call: Call, item: Json, code: int) -> Response:
    response = JSONResponse(_shown(request, call, item), code)
    for warning in call.warnings:
        response.headers.append("Warning", f"299 - {json.dumps(warning)}")
    return response


def _collection(api: Api, request: Request, call: Call, body: Any) -> Response:
    query, resource = request.query_params, call.resource
    if request.method == "POST":
        return _answer(request, call, api.create(call, body), 201)
    wanted = selector(resource, query.get("labelSelector", ""), query.get("fieldSelector", ""))
    if request.method == "GET" and query.get("watch") in ("true", "1"):
        return _watch(api, request, call, wanted)
    items = [item for item in api.store.list(resource, call.namespace) if wanted(item)]
    for meta in [item["metadata"] for item in items] if request.method == "DELETE" else ():
        api.delete(Call(resource, meta.get("namespace", ""), meta["name"]), body)
    about = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
    if not (query.get("continue") or "0").isdigit():
        raise refusal("Continue", token=query["continue"])
    start, limit = (int(query.get(key) or 0) for key in ("continue", "limit"))
    left, items = max(0, len(items) - start - limit) if limit else 0, items[start:][: limit or None]
    metadata: Json = {"resourceVersion": str(api.store.version)}
    metadata |= {"continue": str(start + limit), "remainingItemCount": left} if left else {}
    if "as=Table" in request.headers.get("accept", ""):
        return JSONResponse({**table(resource, items, query.get("includeObject")), "metadata": metadata})
    if not resource.custom:  # typed lists do not repeat the kind
        items = [{key: value for key, value in item.items() if key not in about} for item in items]
    unpaged = {"continue": ""} if resource.custom else {}
    return JSONResponse({**about, "metadata": {**unpaged, **metadata}, "items": items})


def _one(api: Api, request: Request, call: Call, media_type: str, body: Any) -> Response:
    code, query = 200, request.query_params
    match request.method, call.subresource:
        case "POST", "binding":
            code, item = 201, _bind(api, call, body)
        case method, "scale":
            item = _scale(api, call, {} if method == "GET" else body)
        case "GET", _:
            item = api.get(call)
        case "PUT", _:
            item = api.replace(call, body)
        case "PATCH", _:
            code, item = api.patch(call, media_type, body)
        case "DELETE", "":
            options = {key: query[key] for key in ("gracePeriodSeconds", "propagationPolicy") if key in query}
            item = api.delete(call, {**options, **body})
        case _:
            raise refusal("Method")
    return _answer(request, call, item, code)


def _bind(api: Api, call: Call, body: Json) -> Json:
    pod = api.get(call)
    if pod["spec"].get("nodeName"):
        raise refusal("Bound", call.resource, call.name, kind="pods/binding", node=pod["spec"]["nodeName"])
    pod["spec"]["nodeName"] = body["target"]["name"]
    scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": stamp()}
    pod["status"]["conditions"] = [scheduled]
    api.store.put(call.resource, pod)
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def _scale(api: Api, call: Call, body: Json) -> Json:
    item, paths = api.get(call), call.resource.scale_paths
    if body:
        new = copy.deepcopy(item)
        new["spec"]["replicas"] = body.get("spec", {}).get("replicas", 0)
        new["metadata"] |= {key: value for key, value in body.get("metadata", {}).items() if key == "resourceVersion"}
        item = api.update(call, item, new)
    selected = json_path(item, paths.get("labelSelectorPath", ""))
    if not call.resource.custom:
        selected = ",".join(f"{key}={value}" for key, value in sorted(item["spec"]["selector"]["matchLabels"].items()))
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    about = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {key: item["metadata"][key] for key in kept}}
    status = {"replicas": json_path(item, paths["statusReplicasPath"]) or 0}
    status |= {"selector": selected} if selected else {}
    return {**about, "spec": {k: v for k, v in item["spec"].items() if k == "replicas" and v}, "status": status}


def _watch(api: Api, request: Request, call: Call, wanted: Filter) -> Response:
    query, resource = request.query_params, call.resource
    version, whole = query.get("resourceVersion", ""), query.get("sendInitialEvents") == "true"
    if version and not version.isdigit():
        raise refusal("Version", version=version)
    fresh, bookmarks = whole or version in ("", "0"), query.get("allowWatchBookmarks") == "true"
    after, oldest = api.store.version if fresh else int(version), api.store.oldest(resource)
    if after < oldest:
        return JSONResponse({"type": "ERROR", "object": refusal("Expired", after=after, oldest=oldest).status})
    initial = [item for item in api.store.list(resource, call.namespace) if fresh and wanted(item)]
    queue, ends = api.store.watch(after), time.monotonic() + float(query.get("timeoutSeconds") or 3600)
    about = {"kind": resource.kind, "apiVersion": resource.api_version}

    def bookmark(annotations: Json) -> Json:
        metadata = {"resourceVersion": str(api.store.version), "creationTimestamp": None, "annotations": annotations}
        return {"type": "BOOKMARK", "object": {**about, "metadata": metadata}}

    def here(item: Json) -> bool:
        return wanted(item) and call.namespace in ("", item["metadata"].get("namespace"))

    async def events() -> AsyncIterator[Json]:
        for item in initial:
            yield {"type": "ADDED", "object": item}
        if whole and bookmarks:
            yield bookmark({"k8s.io/initial-events-end": "true"})
        while (left := ends - time.monotonic()) > 0:
            change = None
            with contextlib.suppress(TimeoutError):
                change = await asyncio.wait_for(queue.get(), min(left, 10.0))
            event = change.event(resource, here) if change else bookmark({}) if bookmarks else None
            if event is not None:
                yield event

    async def lines() -> AsyncIterator[str]:
        first = True
        try:
            async for event in events():
                shown = event["object"]
                if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                    shown, first = _shown(request, call, shown, headers=first), False
                yield json.dumps({**event, "object": shown}) + "\n"
        finally:
            api.store.watchers.discard(queue)

    return StreamingResponse(lines(), media_type="application/json")
