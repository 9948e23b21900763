"""
A recipe on disk: YAML, composed of the recipes it names as `base`.

    base: [bases/models/qwen3-8b-base.yaml, bases/methods/grpo.yaml]   # or a single name
    stage_updates: 4

Paths are relative to the file that names them. A later base wins over an earlier one, and a file's own keys win over
those of its bases. A value is replaced as a whole: lists and mappings are not merged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

BASE = "base"


class Setting(NamedTuple):
    """A value of a recipe, and the file it is from."""

    value: Any
    path: Path


class _RecipeLoader(yaml.SafeLoader):
    """Refuses a key given twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        if repeated := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(problem=f"{sorted(repeated)} given more than once")
        return super().construct_mapping(node, deep)


def read_recipe(path: Path, parents: tuple[Path, ...] = ()) -> dict[Any, Setting]:
    """
    The settings of a recipe and of all its bases.

    Args:
        path (`Path`): of the file.
        parents (`tuple[Path, ...]`): the files, resolved, that lead to it as a base.

    Raises:
        `ValueError`: a file is missing, is no YAML mapping, has a repeated key, or is its own base.
    """
    chain = (*parents, path.resolve())
    if chain[-1] in parents:
        names = " → ".join(file.name for file in chain[parents.index(chain[-1]) :])
        raise ValueError(f"{path}: `{BASE}` goes in a circle ({names}). Remove one of these lines.")
    recipe = _load(path, parents)
    settings: dict[Any, Setting] = {}
    for name in _bases(path, recipe.pop(BASE, None)):
        settings |= read_recipe(path.parent / name, chain)
    return settings | {key: Setting(value, path) for key, value in recipe.items()}


def _load(path: Path, parents: tuple[Path, ...]) -> dict[Any, Any]:
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), Loader=_RecipeLoader)
    except (OSError, UnicodeDecodeError) as error:
        way_out = f"It is a `{BASE}` of {parents[-1]}." if parents else "Recipes are in `recipes/`."
        raise ValueError(f"The recipe {str(path)!r} cannot be read ({error}). {way_out}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} holds a {type(recipe).__name__}, not `key: value` lines.")
    return recipe


def _bases(path: Path, value: Any) -> list[str]:
    bases = value if isinstance(value, list) else [] if value is None else [value]
    for base in bases:
        if not isinstance(base, str):
            raise ValueError(f"{path}: `{BASE}={value!r}` is not the path of a recipe, or a list of such paths.")
    return bases
