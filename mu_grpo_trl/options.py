"""Values of options as people write them in Python, YAML or on a command line, brought to their declared type."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def nearest(name: object, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"`, to end a message with, or nothing if no choice is close."""
    close = difflib.get_close_matches(str(name), list(choices), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def as_declared(name: str, value: Any, annotation: Any) -> Any:
    """
    `value` as the option's annotation says, converted where nothing is lost: `"1e-6"` is a float, `"8"` and `8.0` are
    ints, `"false"` is a bool, and one string is a list of one.

    Args:
        name (`str`): the option, for the error.
        value (`Any`): what was given; `None` is left to later checks.
        annotation (`Any`): a resolved annotation. Unions of several types are checked for what none of them admits.

    Raises:
        `ValueError`: the value cannot be of that type.
    """
    if value is None:
        return value
    kinds = _alternatives(annotation)
    if len(kinds) == 1 and get_origin(kinds[0]) is list:
        items = value if isinstance(value, list | tuple) else [value]
        return [as_declared(f"{name}[{i}]", item, get_args(kinds[0])[0]) for i, item in enumerate(items)]
    origin = get_origin(kinds[0]) or kinds[0]
    if len(kinds) == 1 and origin in _CONVERTERS:
        what, convert = _CONVERTERS[origin]
        try:
            return convert(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"`{name}={value!r}` is not {what}.{_yaml_hint(value)}") from None
    if str in kinds and isinstance(value, bool | list | dict) and not any(_admits(kind, value) for kind in kinds):
        raise ValueError(f"`{name}={value!r}` is not a text.{_yaml_hint(value)}")
    return value


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for kind in get_args(annotation) if kind is not type(None))
    return (annotation,)


def _admits(kind: Any, value: Any) -> bool:
    origin = get_origin(kind) or kind
    return value in get_args(kind) if origin is Literal else isinstance(value, origin)


def _yaml_hint(value: Any) -> str:
    if not isinstance(value, bool):
        return ""
    return ' YAML reads unquoted yes, no, on and off as truth values: put the word in quotes, such as "no".'


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in _TRUTH:
        raise ValueError
    return _TRUTH[str(value).lower()]


def _as_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _as_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise TypeError
    number: Any = float(value.replace(".inf", "inf")) if isinstance(value, str) else value  # `.inf` is YAML's
    if math.isnan(number):
        raise ValueError
    return number


def _as_text(value: Any) -> Any:
    if isinstance(value, bool | list | tuple | dict):
        raise TypeError
    return str(value) if isinstance(value, Real) else value  # paths and enumerations stay what they are


def _as_mapping(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value


_CONVERTERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bool: ("true or false", _as_bool),
    int: ("a whole number", _as_int),
    float: ("a number", _as_float),
    str: ("a text", _as_text),
    dict: ("a mapping", _as_mapping),
}
