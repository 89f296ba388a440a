"""Follows one JSON value (RFC 8259) character by character, so that parts of it can be passed on before its end."""

from __future__ import annotations

import re
from enum import Enum, auto

_WHITESPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSERS = {"{": "}", "[": "]"}


class Scan(Enum):
    MORE = auto()
    """The character is part of the value, which goes on."""
    END = auto()
    """The character is the value's last one."""
    BEHIND = auto()
    """The value, a number, ended before this character."""
    INVALID = auto()
    """No JSON value goes on so."""


class _State(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    AFTER = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()


class JsonScanner:
    """One value. Push its characters until the answer is not MORE; leading blanks are part of it.

    Nesting costs memory, not recursion. Control characters inside strings, which JSON forbids and models write all
    the same, are accepted: `in_string` tells the caller that it may escape them.
    """

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._open: list[str] = []
        self._string_is_key = False
        self._hex_left = 0
        self._atom = ""

    @property
    def in_string(self) -> bool:
        """Whether the next character is inside a string (its closing quote included)."""
        return self._state in (_State.STRING, _State.ESCAPE, _State.HEX)

    def push(self, character: str) -> Scan:
        if self._state is _State.NUMBER:
            if character in "0123456789+-.eE":
                self._atom += character
                return Scan.MORE
            if _NUMBER.fullmatch(self._atom) is None:
                return Scan.INVALID
            if not self._open:
                return Scan.BEHIND
            self._state = _State.AFTER
        return _STEPS[self._state](self, character)

    def _ended(self) -> Scan:
        """A value has ended; it may have been the whole."""
        self._state = _State.AFTER
        return Scan.MORE if self._open else Scan.END

    def _value(self, character: str) -> Scan:
        if character in _WHITESPACE:
            return Scan.MORE
        if self._state is _State.FIRST_ITEM and character == "]":
            self._open.pop()
            return self._ended()
        if character == '"':
            self._state, self._string_is_key = _State.STRING, False
        elif character in _CLOSERS:
            self._open.append(character)
            self._state = _State.FIRST_KEY if character == "{" else _State.FIRST_ITEM
        elif character in _LITERALS:
            self._state, self._atom = _State.LITERAL, _LITERALS[character][1:]
        elif character in "-0123456789":
            self._state, self._atom = _State.NUMBER, character
        else:
            return Scan.INVALID
        return Scan.MORE

    def _key(self, character: str) -> Scan:
        if character in _WHITESPACE:
            return Scan.MORE
        if character == '"':
            self._state, self._string_is_key = _State.STRING, True
            return Scan.MORE
        if self._state is _State.FIRST_KEY and character == "}":
            self._open.pop()
            return self._ended()
        return Scan.INVALID

    def _colon(self, character: str) -> Scan:
        if character in _WHITESPACE:
            return Scan.MORE
        self._state = _State.VALUE
        return Scan.MORE if character == ":" else Scan.INVALID

    def _after(self, character: str) -> Scan:
        if character in _WHITESPACE:
            return Scan.MORE
        if character == ",":
            self._state = _State.KEY if self._open[-1] == "{" else _State.VALUE
            return Scan.MORE
        if character == _CLOSERS[self._open[-1]]:
            self._open.pop()
            return self._ended()
        return Scan.INVALID

    def _string(self, character: str) -> Scan:
        if character == "\\":
            self._state = _State.ESCAPE
        elif character == '"':
            if not self._string_is_key:
                return self._ended()
            self._state = _State.COLON
        return Scan.MORE

    def _escape(self, character: str) -> Scan:
        if character == "u":
            self._state, self._hex_left = _State.HEX, 4
        elif character in '"\\/bfnrt':
            self._state = _State.STRING
        else:
            return Scan.INVALID
        return Scan.MORE

    def _hex(self, character: str) -> Scan:
        if character not in "0123456789abcdefABCDEF":
            return Scan.INVALID
        self._hex_left -= 1
        if not self._hex_left:
            self._state = _State.STRING
        return Scan.MORE

    def _literal(self, character: str) -> Scan:
        if character != self._atom[0]:
            return Scan.INVALID
        self._atom = self._atom[1:]
        return Scan.MORE if self._atom else self._ended()


_STEPS = {
    _State.VALUE: JsonScanner._value,
    _State.FIRST_ITEM: JsonScanner._value,
    _State.FIRST_KEY: JsonScanner._key,
    _State.KEY: JsonScanner._key,
    _State.COLON: JsonScanner._colon,
    _State.AFTER: JsonScanner._after,
    _State.STRING: JsonScanner._string,
    _State.ESCAPE: JsonScanner._escape,
    _State.HEX: JsonScanner._hex,
    _State.LITERAL: JsonScanner._literal,
}
