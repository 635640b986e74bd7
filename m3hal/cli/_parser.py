"""argparse's parser, with a suggestion for what was mistyped."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from m3hal.dispatch.errors import nearest

_INVALID = re.compile(r"(?P<told>.*invalid choice: '(?P<name>[^']*)')", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Options are written whole; an unknown option, command or choice is told with the nearest known one."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **keywords})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Nothing may be left over; a command says so itself, since only it knows its options."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            option = next((one.partition("=")[0] for one in rest if one.startswith("-")), "")
            self.error(f"unrecognized arguments: {' '.join(rest)}{_meant(option, self._option_string_actions)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """The usage and one line; exits with 2."""
        invalid = _INVALID.match(message)
        known = [str(choice) for action in self._actions for choice in action.choices or ()]
        meant = _meant(invalid["name"], known) if invalid else ""
        super().error(invalid["told"] + meant if invalid and meant else message)


def _meant(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f". Did you mean {near!r}?" if near else ""
