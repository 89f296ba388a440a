"""One tool call in Hermes format, character by character: an object with `name` and `arguments`, in either order."""

from __future__ import annotations

import json
from enum import Enum, auto

from reprise_engine.text.answer_parts import Part, ToolCallArguments, ToolCallBegin, ToolCallEnd
from reprise_engine.text.json_scan import JsonScanner, Scan

_WHITESPACE = " \t\n\r"


class _At(Enum):
    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()
    BEHIND = auto()


class HermesCall:
    """The call is given out once its name is known and its arguments have begun; before that it may be no call at all.

    Arguments that are a string holding an object are given out as that object, null ones as `{}`, and missing ones too.
    Raw control characters inside strings are escaped, which makes valid JSON of what was meant.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.raw = ""
        """All of it so far, until it is given out."""
        self.begun = False
        """Whether it has been given out."""
        self._at = _At.OBJECT
        self._scanner = JsonScanner()
        self._key: object = None
        self._token = ""
        """The text of the key, of the name, or of arguments that cannot be passed on as they come."""
        self._name: str | None = None
        self._arguments = ""
        """Held until the name is known."""
        self.arguments_ended = False
        self._has_arguments = False
        self._whole_arguments = False
        """Whether they are held until they end: a string, or null."""
        self._parts: list[Part] = []

    @property
    def complete(self) -> bool:
        return self._at is _At.BEHIND

    def taken(self) -> list[Part]:
        """What can be given out since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def cut_off(self) -> list[Part]:
        """The rest of a call that has begun, where the text ends inside it."""
        if self._at is _At.IN_VALUE and self._key == "arguments" and self._whole_arguments:
            self._give(self._token)
        return [*self.taken(), *([ToolCallEnd(self.index)] if self.arguments_ended else [])]

    def push(self, character: str) -> bool:
        """Whether the call goes on so. After False the character is not taken, and the call is broken."""
        if self._at is _At.IN_VALUE:
            scan = self._in_value(character)
            if scan is not Scan.BEHIND:
                return self._took(character, scan is not Scan.INVALID)
        elif self._at is _At.IN_KEY:
            return self._took(character, self._in_key(character))
        if character in _WHITESPACE:
            return self._took(character, True)
        return self._took(character, self._mark(character))

    def _took(self, character: str, fine: bool) -> bool:
        if fine and not self.begun:
            self.raw += character
        return fine

    def _mark(self, character: str) -> bool:
        """A character between keys and values."""
        match self._at, character:
            case _At.OBJECT, "{":
                self._at = _At.FIRST_KEY
            case ((_At.FIRST_KEY | _At.COMMA), "}"):
                return self._close()
            case ((_At.FIRST_KEY | _At.KEY), '"'):
                self._at, self._scanner, self._token = _At.IN_KEY, JsonScanner(), '"'
                self._scanner.push('"')
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.COMMA, ",":
                self._at = _At.KEY
            case _At.VALUE, _:
                return self._open_value(character)
            case _:
                return False
        return True

    def _in_key(self, character: str) -> bool:
        scan = self._scanner.push(character)
        self._token += character
        if scan is Scan.END:
            self._at, self._key = _At.COLON, _decoded(self._token)
        return scan is not Scan.INVALID

    def _open_value(self, character: str) -> bool:
        if (self._key == "name" and self._name is not None) or (self._key == "arguments" and self._has_arguments):
            self._key = None  # for the second time: the first one counts
        self._at, self._scanner, self._token = _At.IN_VALUE, JsonScanner(), ""
        if self._key == "arguments":
            self._has_arguments = True
            self._whole_arguments = character in '"n'
            self._begin()
        return self._in_value(character) is not Scan.INVALID

    def _in_value(self, character: str) -> Scan:
        in_string = self._scanner.in_string
        scan = self._scanner.push(character)
        if scan is Scan.INVALID:
            if self._key == "arguments" and self._whole_arguments and self.begun:
                self._give(self._token)
            return scan
        if scan is not Scan.BEHIND:
            text = json.dumps(character)[1:-1] if in_string and character < " " else character
            if self._key == "arguments" and not self._whole_arguments:
                self._give(text)
            else:
                self._token += text
        if scan is Scan.END or scan is Scan.BEHIND:
            self._at = _At.COMMA
            if not self._end_value():
                return Scan.INVALID
        return scan

    def _end_value(self) -> bool:
        if self._key == "name":
            name = _decoded(self._token)
            if not isinstance(name, str) or not name:
                return False
            self._name = name
            if self._has_arguments:
                self._begin()
        elif self._key == "arguments":
            self.arguments_ended = True
            if self._whole_arguments:
                value = _decoded(self._token)
                is_object = isinstance(value, str) and isinstance(_decoded(value), dict)
                self._give("{}" if value is None else str(value) if is_object else self._token)
        return True

    def _close(self) -> bool:
        if self._name is None:
            return False
        if not self._has_arguments:
            self._has_arguments = True
            self._begin()
            self._give("{}")
        self._at = _At.BEHIND
        self._parts.append(ToolCallEnd(self.index))
        return True

    def _begin(self) -> None:
        if self._name is not None:
            self.begun = True
            self._parts.append(ToolCallBegin(self.index, self._name))
            held, self._arguments = self._arguments, ""
            self._give(held)

    def _give(self, text: str) -> None:
        if self.begun:
            self._parts.append(ToolCallArguments(self.index, text))
        else:
            self._arguments += text


def _decoded(text: str) -> object:
    """The value of a JSON text; the text itself where it is none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value
