"""Errors that users and other processes see. Standard library only.

`ConfigError` is the one line that bad input earns: field, value, what is allowed, what to do. The others cross process
boundaries: each pickles with its arguments, so that the side that catches it still knows replica, round and seconds.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """Bad input, found before any work is done; jobs print it as one line and exit with code 2."""

    def __init__(self, field: str, value: object, allowed: str, remedy: str = "") -> None:
        super().__init__(field, value, allowed, remedy)
        self.field, self.value, self.allowed, self.remedy = field, value, allowed, remedy

    def __str__(self) -> str:
        line = f"{self.field} is {self.value!r}: {self.allowed}"
        return " ".join((f"{line}; {self.remedy}" if self.remedy else line).split())

    def __reduce__(self):
        return type(self), (self.field, self.value, self.allowed, self.remedy)


class RunError(RuntimeError):
    """A run that could not go on. `reason` is one word or phrase for records, `detail` the sentence for people."""

    def __init__(self, reason: str, detail: str, checkpoint: str = "") -> None:
        super().__init__(reason, detail, checkpoint)
        self.reason, self.detail, self.checkpoint = reason, detail, checkpoint

    def __str__(self) -> str:
        resume = f"; resume from {self.checkpoint}" if self.checkpoint else ""
        return f"{self.reason}: {self.detail}{resume}"

    def __reduce__(self):
        return type(self), (self.reason, self.detail, self.checkpoint)


class StoppedError(RunError):
    """A run that was asked to stop before its first round: nothing is lost, and the same command begins or goes on."""


class ReplicaLostError(RuntimeError):
    """A replica that another one needed died or stayed silent: who, after how many seconds, and what was seen."""

    def __init__(self, replica_id: int, seconds: float, cause: str) -> None:
        super().__init__(replica_id, seconds, cause)
        self.replica_id, self.seconds, self.cause = replica_id, seconds, cause

    def __str__(self) -> str:
        return f"replica {self.replica_id} was lost after {self.seconds:.1f} s: {self.cause}"

    def __reduce__(self):
        return type(self), (self.replica_id, self.seconds, self.cause)


class CollectiveError(RuntimeError):
    """A collective failed or timed out; its group is gone and a new generation must be formed."""

    def __init__(self, group: str, operation: str, seconds: float, cause: str) -> None:
        super().__init__(group, operation, seconds, cause)
        self.group, self.operation, self.seconds, self.cause = group, operation, seconds, cause

    def __str__(self) -> str:
        return f"{self.operation} in group {self.group} failed after {self.seconds:.1f} s: {self.cause}"

    def __reduce__(self):
        return type(self), (self.group, self.operation, self.seconds, self.cause)
