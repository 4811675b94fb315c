"""What every job does around its work: errors become one line on standard error and an exit code.

0 done · 2 bad input · 3 stopped and checkpointed on request · 4 gave up · 130 interrupted
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ray_muloco.errors import ConfigError, RunError

BAD_INPUT, GAVE_UP, INTERRUPTED = 2, 4, 130
_T = TypeVar("_T")


def run(main: Callable[[], int]) -> NoReturn:
    """Run a job's main and exit with its code; ConfigError and RunError are printed as one line."""
    try:
        code = main()
    except ConfigError as error:
        code = _complain(error, BAD_INPUT)
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
    """tyro.cli, except that a value which the record itself refuses leaves as its ConfigError, not as a box without the reason."""
    import tyro

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # some of its boxes ignore console_outputs
            return tyro.cli(kind, console_outputs=False, **options)
    except SystemExit as stop:
        error = _behind(stop)
        if error is not None:
            raise error from None
    return tyro.cli(kind, **options)  # help, or flags that cannot be parsed: now say so, and exit


def _behind(error: BaseException | None) -> ConfigError | None:
    """The ConfigError during whose handling this error was raised, if any."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error


def _complain(error: object, code: int) -> int:
    print("error:" if isinstance(error, Exception) else "stopped:", " ".join(str(error).split()), file=sys.stderr, flush=True)
    return code
