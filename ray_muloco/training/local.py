"""fit without Ray: all replicas in this process, one after another. For reading, debugging and small machines."""

from __future__ import annotations

import os
from typing import Any

import torch

from ray_muloco.config import TrainConfig
from ray_muloco.training import preflight
from ray_muloco.training.metrics import Result
from ray_muloco.training.preflight import result_of, tracking_uri_of, with_threads
from ray_muloco.training.session import local_seats, run_session
from ray_muloco.training.signals import stop_signals


def fit_local(config: TrainConfig, *, listener: Any) -> Result:
    """Like runtime.fit, in this process. Same files, same numbers; bit for bit where the sums run in the same order."""
    checked = preflight.check(config)
    if checked.finished_result is not None:
        listener.message(f"run {checked.config.run_name} is finished; nothing to do ({checked.run_path})")
        return result_of(checked.finished_result, checked.run_path)
    config = with_threads(checked.config, os.cpu_count() or 1)
    before = torch.get_num_threads()
    torch.set_num_threads(config.scaling.threads_per_replica)
    try:
        with stop_signals() as stopping:
            return result_of(run_session(config, tracking_uri_of(config), local_seats(), listener, stopping), checked.run_path)
    finally:
        torch.set_num_threads(before)
