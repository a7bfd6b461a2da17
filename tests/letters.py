"""The letters of texts that hypothesis draws: to know all of Unicode takes it seconds."""

from __future__ import annotations

# Of each kind that is known for trouble: quotes, separators, what ends a line or a text, a letter
# that has two forms, one of two bytes, three and four, one that is written from right to left.
LETTERS = "aZ09 _-.,:;/\\'\"[]{}#%\n\r\t\0\x1b\x85é\u0301ß漢א\u202e\ufeff😀"
