"""Parse JSON and YAML of any content; `ValueError` with one clause when it cannot be used."""

from __future__ import annotations

import json
from typing import Any, Final

import yaml

from distmon.untrusted.values import encodable

MOST_YAML_NODES: Final = 20_000
"""Values in a document with every alias written out."""
MOST_DEPTH: Final = 50
"""Levels of nesting in a document that is walked recursively afterwards."""


def parse_json(text: str | bytes) -> Any:
    """Return the value; ValueError when it is not JSON, or nested too deeply for the parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document with plain types.

    Raises ValueError also for one whose aliases stand for too many values: ten
    lines can stand for a billion.
    """
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (ValueError, TypeError, OverflowError, AttributeError, LookupError) as error:
        # The constructors of dates and numbers raise these for what only looks like one.
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from None
    finally:
        if loader is not None:
            loader.dispose()


def check_plain(value: Any) -> None:
    """Raise ValueError for values that break what is done with settings later.

    Lists and mappings nested more than 50 levels deep, integers of more than 64 bits (they cannot
    become a float, and some cannot even be printed), text that no encoding accepts.
    """
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.keys()
                below += each.values()
            elif isinstance(each, list | tuple):
                below += each
            elif isinstance(each, int) and abs(each) >= 2**63:
                raise ValueError("it contains an integer of more than 64 bits")
            elif isinstance(each, str) and encodable(each) != each:
                raise ValueError("it contains text that is not valid Unicode")
        if not below:
            return
        level = below
    raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep")


def _check_size(root: yaml.Node) -> None:
    """Count the values that the document stands for, without visiting one twice."""
    sizes: dict[int, int] = {}
    unfinished = -1

    def size(node: yaml.Node, depth: int) -> int:
        known = sizes.get(id(node))
        if known == unfinished:
            raise ValueError("it contains itself through an alias")
        if known is not None:
            return known
        if depth > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep")
        sizes[id(node)] = unfinished
        total = 1
        if isinstance(node, yaml.SequenceNode):
            total += sum(size(each, depth + 1) for each in node.value)
        elif isinstance(node, yaml.MappingNode):
            total += sum(size(k, depth + 1) + size(v, depth + 1) for k, v in node.value)
        if total > MOST_YAML_NODES:
            raise ValueError(f"it stands for more than {MOST_YAML_NODES} values")
        sizes[id(node)] = total
        return total

    size(root, 0)
