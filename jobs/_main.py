"""What every job does around its work: errors become one line on standard error and an exit code.

0 done · 2 bad input · 3 stopped and checkpointed on request · 4 gave up · 130 interrupted
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ray_muloco.errors import ConfigError, RunError, StoppedError

BAD_INPUT, STOPPED, GAVE_UP, INTERRUPTED = 2, 3, 4, 130
_T = TypeVar("_T")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class FlagError(Exception):
    """Flags that cannot be parsed; the sentence says which."""


def run(main: Callable[[], int]) -> NoReturn:
    """Run a job's main and exit with its code; ConfigError and RunError are printed as one line."""
    try:
        code = main()
    except (ConfigError, FlagError) as error:
        code = _complain(error, BAD_INPUT)
    except StoppedError as error:
        code = _complain(error, STOPPED)
    except RunError as error:
        code = _complain(error, GAVE_UP)
    except KeyboardInterrupt:
        code = _complain("interrupted", INTERRUPTED)
    except SystemExit as stop:
        error = _behind(stop)
        if error is None:
            raise
        code = _complain(error, BAD_INPUT)
    sys.exit(code)


def parse(kind: Callable[..., _T], **options: Any) -> _T:
    """tyro.cli with its errors as exceptions: ConfigError for a value that the record itself refuses, FlagError for the rest."""
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, **options)
    except SystemExit as stop:
        error = _behind(stop)
        if error is not None:
            raise error from None
        if not stop.code:  # help
            raise
        raise FlagError(_sentence(said.getvalue())) from None


def _sentence(box: str) -> str:
    """tyro's box on one line: what is wrong, the flags that may have been meant, where help is."""
    lines = [line.strip("│ ") for line in _COLOUR.sub("", box).splitlines() if not line.startswith(("╭", "╰"))]
    sections = re.split(r"\n[─-]{9,}\n", "\n".join(lines))
    if "│" not in box:  # drawn for a terminal without line characters: the title is a section of its own
        sections = sections[1:] or sections
    wrong = " ".join(sections[0].split())
    meant = [match[1] for section in sections[1:] for match in re.finditer(r"^(--\S+)", section, re.MULTILINE) if match[1] not in wrong]
    program = re.search(r"\S+\.py(?: \S+)? --help", " ".join(sections[-1].split()))
    hints = ([f"perhaps you meant {', '.join(meant)}"] if meant else []) + ([f"see {program[0]}"] if program else [])
    return "; ".join([wrong.rstrip("."), *hints])


# ---- --json


def check_json_place(path: str | Path | None) -> None:
    """Refuse a --json that could not be written when the work is done; nothing is written. Empty and None mean no file."""
    if not path:
        return
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise ConfigError("json", str(path), "must lie in a directory that exists", f"make {file.parent}")
    if file.is_dir():
        raise ConfigError("json", str(path), "is a directory", "name a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError("json", str(path), "must be writable")


def write_json(path: str | Path | None, figures: object) -> None:
    """A job's figures for programs, where --json says; nothing without one."""
    if path:
        Path(path).write_text(json.dumps(figures, indent=2), encoding="utf-8")


def _behind(error: BaseException | None) -> ConfigError | None:
    """The ConfigError during whose handling this error was raised, if any."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error


def _complain(error: object, code: int) -> int:
    print("error:" if isinstance(error, Exception) else "stopped:", " ".join(str(error).split()), file=sys.stderr, flush=True)
    return code
