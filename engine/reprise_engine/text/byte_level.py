"""How byte-level vocabularies write bytes."""

from __future__ import annotations


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (`bytes_to_unicode` of openai/gpt-2 encoder.py), inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet |= {chr(256 + index): byte for index, byte in enumerate(others)}
    return alphabet


BYTE_LEVEL = _byte_level_alphabet()
