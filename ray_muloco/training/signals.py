"""Signals that ask a run to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Within it, SIGINT and SIGTERM set a flag; a second SIGINT interrupts. After ray.init, which takes SIGTERM for itself."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag.is_set
        return

    def handle(number: int, _frame: object) -> None:
        if flag.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        flag.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
