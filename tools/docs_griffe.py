"""
TRL's docstring format as mkdocstrings reads it: references [`name`] and [`~module.name`] become the code they name,
and the types in `name (`str`, *optional*)` lose their markup, since types are shown as code anyway.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

REFERENCE = re.compile(r"\[`~?(?:[\w.]+\.)?(\w+)`\](?![\[(])")
PARAMETER = re.compile(r"^( +[\w, ]+)\((`.*)\)((?:, [\w, ]+\(`.*\))*):", re.MULTILINE)
RETURNED_OR_RAISED = re.compile(r"^( +)(`[^:\n]*`(?: \([^:\n]*\))?):", re.MULTILINE)


class TRLDocstrings(Extension):
    """Translates every docstring before it is parsed."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = REFERENCE.sub(r"`\1`", obj.docstring.value)
            text = PARAMETER.sub(lambda entry: re.sub("[`*]", "", entry[0]), text)
            obj.docstring.value = RETURNED_OR_RAISED.sub(lambda entry: entry[0].replace("`", ""), text)
