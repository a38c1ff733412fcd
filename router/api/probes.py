"""Probes, metrics and the model list."""

from __future__ import annotations

from time import time
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from hackkv import __version__
from hackkv.types import Role
from router.api.answers import Error, Live, Model, Models, Readiness, Version
from router.api.errors import HTTPError
from router.api.intake import served_by
from router.watch.account import codec_loss

routes = APIRouter()

_STARTED = int(time())
_PROBED: Final = ["GET", "HEAD"]
_READINESS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": Readiness},
    503: {"model": Readiness, "description": "no node of a role is there, or the router stops"},
}


@routes.api_route("/live", methods=_PROBED, responses={200: {"model": Live}})
async def live() -> Response:
    """200: the event loop runs."""
    return JSONResponse({"status": "live"})


@routes.api_route("/ready", methods=_PROBED, responses=_READINESS)
@routes.api_route("/health", methods=_PROBED, responses=_READINESS)
async def ready(request: Request) -> Response:
    """200 when at least one node of each role holds a lease and is not draining; else 503 with what is missing."""
    dispatcher = served_by(request).dispatcher
    fleet = dispatcher.fleet.nodes
    nodes = {str(role): sum(not member.draining for member in fleet.members(role)) for role in Role}
    if dispatcher.closing:
        return JSONResponse({"status": "stopping", "missing": list(fleet.missing), "nodes": nodes}, status_code=503)
    if fleet.missing:
        return JSONResponse({"status": "not ready", "missing": list(fleet.missing), "nodes": nodes}, status_code=503)
    return JSONResponse({"status": "ready", "nodes": nodes})


@routes.get("/version", responses={200: {"model": Version}})
async def version(request: Request) -> Response:
    """The program's version, what computes on each node, and what its codec costs the model."""
    members = served_by(request).dispatcher.fleet.nodes.members()
    nodes = {
        member.node_id: {
            "role": member.info.role,
            "kernels": member.info.kernels,
            "codec_loss": codec_loss(member.info.loss),
        }
        for member in members
    }
    return JSONResponse({"version": __version__, "nodes": nodes})


@routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(await served_by(request).metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


@routes.get("/v1/models", responses={200: {"model": Models}})
async def models(request: Request) -> Response:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(request)]})


@routes.get("/v1/models/{model:path}", responses={200: {"model": Model}, 404: {"model": Error}})
async def model(request: Request, model: str) -> Response:
    """One model, or 404."""
    found = _model(request)
    if model != found["id"]:
        raise HTTPError(404, f"the model {model!r} does not exist", "model_not_found", "model")
    return JSONResponse(found)


def _model(request: Request) -> dict[str, Any]:
    served = served_by(request)
    capacity = served.dispatcher.fleet.capacity
    max_model_len = capacity.max_context if capacity.known else None
    return {
        "id": served.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "hackkv",
        "max_model_len": max_model_len,
    }
