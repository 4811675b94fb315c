"""Waiting for actors, always with a deadline: who answered, and who is gone with what cause."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ray_muloco.errors import CollectiveError, ConfigError, ReplicaLostError


def collect(calls: Mapping[int, Any], limit: float, begin: float | None = None) -> tuple[dict[int, Any], dict[int, str]]:
    """Answers by replica, and causes for those that are lost: dead, silent beyond `limit` seconds, or failed in our own code.

    begin: of the monotonic clock when the calls were made; now if it is not said.
    A replica whose collective failed, or whose donor died, lives and is in neither. Raises ConfigError when a replica did.
    """
    deadline = (time.monotonic() if begin is None else begin) + limit
    answers: dict[int, Any] = {}
    lost: dict[int, str] = {}
    waiting = {call: k for k, call in calls.items()}
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            lost.update(dict.fromkeys(waiting.values(), f"silent for {limit:.0f} s"))
            break
        k = waiting.pop(ready[0])
        try:
            answers[k] = ray.get(ready[0], timeout=max(1.0, deadline - time.monotonic()))
        except RayTaskError as error:
            cause = raised(error)
            if isinstance(cause, ConfigError):
                raise cause from None
            if not isinstance(cause, CollectiveError | ReplicaLostError):
                lost[k] = f"{type(cause).__name__}: {cause}"
        except GetTimeoutError:
            lost[k] = f"its answer did not arrive within {limit:.0f} s"
        except RayError as error:  # its actor, its node, or its answer is gone
            lost[k] = died(error)
    return answers, lost


def died(error: RayError) -> str:
    """An actor's death in a few words: of itself, of its node, of want of memory."""
    return f"its actor died ({(str(error) or type(error).__name__).splitlines()[0]})"


def raised(error: RayTaskError) -> BaseException:
    """What an actor's method raised, as it was there."""
    return error.cause if isinstance(error.cause, BaseException) else error


def first_death(calls: Mapping[int, Any]) -> str:
    """Names a replica whose actor died under one of these calls; empty while none did. Does not wait."""
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=0)
    for k, call in calls.items():
        if call in ready:
            try:
                ray.get(call, timeout=1.0)
            except (RayTaskError, GetTimeoutError):  # whoever collects the answers deals with these
                continue
            except RayError:
                return f"replica {k} died"
    return ""


def late(calls: Mapping[int, Any], limit: float, grace: float) -> list[int]:
    """Whose calls are still going on `grace` seconds after the first one was answered; nobody's when none is within `limit` seconds."""
    deadline = time.monotonic() + limit
    waiting = list(calls.values())
    while waiting:
        ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return []
        try:
            ray.get(ready[0], timeout=1.0)
        except RayError:  # a death is no answer
            continue
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(grace, max(0.0, deadline - time.monotonic()))) if waiting else ([], [])
        return [k for k, call in calls.items() if call in waiting]
    return []
