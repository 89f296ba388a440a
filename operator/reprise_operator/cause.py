"""Why a pod does not become ready, in few words: the END of what its container said, without secrets. Pure."""

from __future__ import annotations

import re

MAX_CAUSE = 700
"""Characters of a cause in a condition's message."""
HIDDEN = "[hidden]"

# What programs print by mistake: keys in arguments, headers, environments and URLs, and tokens that show by their form.
_NAMED = re.compile(
    r"""(?ix)
    ((?:api[-_]?key|access[-_]?key|secret(?:[-_]?(?:access[-_]?)?key)?|client[-_]?secret|password|passwd
       |(?:auth|access|hf|bearer|session|security)[-_]?token|authorization|x-amz-signature|x-amz-security-token)
     ['"]?\s*(?:=|:|\s(?=bearer\s))\s*(?:bearer\s+|basic\s+)?['"\[(]*)
    ([^\s'",;)\]&]{4,})
    """
)
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[0-9A-Z]{16}|gh[opsu]_[A-Za-z0-9]{20,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s'\",;]{8,}")
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@]+@")


def without_secrets(text: str) -> str:
    """`text` with what looks like a credential hidden."""
    text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    text = _FORMS.sub(HIDDEN, text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    return _NAMED.sub(lambda match: match[1] + HIDDEN, text)


def end_of(text: str, *, limit: int = MAX_CAUSE) -> str:
    """The last `limit` characters, on one line, from the beginning of a word: the end of a log is what says why."""
    line = " ".join(without_secrets(text).split())
    if len(line) <= limit:
        return line
    kept = line[-(limit - 2) :]
    return f"… {kept.partition(' ')[2] or kept}"
