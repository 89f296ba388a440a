"""What is served without an API key: probes and scrapers have none, and a browser none before the page asks for it."""

from __future__ import annotations

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Not worth a line in the log either."""

PAGE_PATHS = frozenset({"/"})
"""The page; what it asks the API for needs the key."""
