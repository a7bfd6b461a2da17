"""The words of an annotation, one after the other, and the caret under the one that is wrong."""

from __future__ import annotations

import dataclasses
import re
from typing import NoReturn

from paritas.errors import UsageError

__all__ = ["Token", "Tokens"]

# A suffix with the reduction it names and a halo with its numbers are one word each.
_TOKEN = re.compile(r"->|\w+|\+\w*|~\w*(?::\w+)?|[*?/^():;,=!@\[\]]")


@dataclasses.dataclass(frozen=True)
class Token:
    """A word, and where it begins; an empty one at the end."""

    text: str
    begin: int

    @property
    def is_word(self) -> bool:
        """Whether it is a name or a number."""
        return self.text.replace("_", "a").isalnum()


class Tokens:
    """The words of a text, read from the front."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._cut()
        self._at = 0

    def _cut(self) -> list[Token]:
        tokens, at = [], 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is not None:
                tokens.append(Token(match[0], at))
                at = match.end()
            elif self._text[at] == " ":
                at += 1
            else:
                self.fail(
                    Token(self._text[at], at), f"`{self._text[at]}` is no part of an annotation"
                )
        return [*tokens, Token("", len(self._text))]

    def peek(self, ahead: int) -> Token:
        """A word further on."""
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    @property
    def next(self) -> Token:
        """The word that is read next."""
        return self.peek(0)

    @property
    def glued(self) -> bool:
        """Whether no space is before it."""
        return self._at > 0 and self._text[self.next.begin - 1] != " "

    def step(self) -> Token:
        """Read it."""
        token = self.next
        self._at += 1
        return token

    def take(self, text: str, hint: str) -> None:
        """Read a word that has to be there."""
        if self.next.text != text:
            self.fail(self.next, f"`{text}` is missing: {hint}")
        self.step()

    def identifier(self) -> str:
        """Read a name."""
        token = self.next
        if not token.text.isidentifier():
            what = f"`{token.text}`" if token.text else "the end"
            self.fail(token, f"{what} where a name is due: letters, digits and `_`, no digit first")
        return self.step().text

    def fail(self, token: Token, why: str) -> NoReturn:
        """Show the annotation with a caret."""
        raise UsageError(f"annotation: {why}\n  {self._text}\n  {' ' * token.begin}^")
