"""What is served without an API key and not worth a line in the log: probes and scrapers have no key."""

from __future__ import annotations

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
