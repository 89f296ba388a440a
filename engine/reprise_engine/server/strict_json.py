"""JSON in the strict sense of RFC 8259: no NaN, no Infinity, no halves of surrogate pairs, which Python's parser takes.

No answer can repeat any of them, and no tokenizer reads the last: they are refused where they come in, and not wherever
they happen to be used. It holds the event loop up less than Python's parser, too.
"""

from __future__ import annotations

from typing import Any

import msgspec

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_json(content: bytes) -> Any:
    """Raises ValueError in words for the sender. The content is UTF-8, with a byte order mark or without."""
    try:
        return msgspec.json.decode(content.removeprefix(_BYTE_ORDER_MARK))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise ValueError(str(error).removeprefix("JSON is malformed: ")) from None
