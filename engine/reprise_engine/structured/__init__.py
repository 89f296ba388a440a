"""Structured output: which tokens a grammar allows next. Free of torch."""
