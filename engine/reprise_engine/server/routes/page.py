"""GET /: one page to talk to the model, and to see what the prefix cache saves. It loads nothing from elsewhere.

Open without a key, like any page that asks for one: what it then calls is not.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()


@cache
def _page() -> tuple[str, str]:
    """The page and its Content-Security-Policy: only its own script and style run, and it calls only this server."""
    content = files("reprise_engine.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of(content, "script"),
        "style-src": _hash_of(content, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return content, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hash_of(content: str, element: str) -> str:
    """The source expression that allows the page's one inline `element`, and nothing else."""
    [inline] = re.findall(rf"<{element}>(.*?)</{element}>", content, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    content, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(content, headers=headers)
