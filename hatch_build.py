"""The description of the package: the README without links to files that only its folder has.

A package index shows the README alone, and there is no address of the repository to complete its
relative links with. They become the names of files, which the sdist has.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#\s]+)(?:#[^)\s]*)?\)")
_WHERE = "\nFiles that are named here, such as `docs/tutorial.md`, are in the source archive.\n"


def standalone(readme: str) -> str:
    """The README as it can be read without the files beside it."""
    parts = _CODE.split(readme)
    parts[::2] = [_LINK.sub(_name_file, _IMAGE.sub("", text)) for text in parts[::2]]
    return "".join(parts).rstrip("\n") + "\n" + _WHERE


def _name_file(link: re.Match[str]) -> str:
    text, file = link.groups()
    return f"`{file}`" if text.strip("`") == file else f"{text} (`{file}`)"


class StandaloneReadme(MetadataHookInterface):
    """Sets the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """See hatchling."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": standalone(readme)}
