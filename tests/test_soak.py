"""A long run whose members come and go holds no more at its end than it did at its beginning."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from faults import Fault, Script
from laws import Laws, records, run, small_config
from toy import toy_dataset

from ray_muloco.analysis.recovery import audit_samples
from ray_muloco.training.manifest import newest_manifest


def test_a_thousand_rounds_with_a_join_or_a_leave_every_five_hold_no_more_at_their_end(tmp_path: Path) -> None:
    """E12: another system died after some thousands of steps of changing membership. Memory, descriptors and threads stay what they are."""
    rounds, every = 1000, 5
    faults = [Fault(attempt, "inner", "silent", attempt % 2) for attempt in range(every, rounds, 2 * every)]
    config = small_config(
        tmp_path, rounds=rounds // 2, replicas=2, scaling__min_replicas=1, sync_interval=1, eval_every_rounds=50, checkpoint__every_rounds=100
    )
    script, held = Script(*faults, join_after=every - 1), []
    me = psutil.Process()

    class Watched(Laws):
        def recorded(self, record: Mapping[str, Any]) -> None:
            super().recorded(record)
            self.trained[:-1] = [[] for _ in self.trained[:-1]]  # what the laws themselves remember would grow
            self.replicas = {k: replica for k, replica in self.replicas.items() if k in self.group.replicas}
            gc.collect(0 if record["round"] % 50 else 2)
            held.append((me.memory_info().rss, me.num_fds(), me.num_threads()))

        def samples_are_accounted_for(self) -> None:
            pass  # of all rounds at once; the records say it at the end

    laws = Watched(config)
    gc.collect()
    gc.freeze()  # what the tests before left behind: a full collection of it takes half a second, and there are 25
    try:
        result = run(config, toy_dataset(), script, laws)
    finally:
        gc.unfreeze()
    assert result is not None
    assert not script.faults
    counts = [record["alive"] for record in records(config)]
    assert len(counts) >= rounds
    changes = sum(a != b for a, b in itertools.pairwise(counts))
    assert changes >= 1.8 * rounds / (2 * every), "a leave and a join in every ten rounds"
    early, late = ([statistics.median(column) for column in zip(*held[a:b], strict=True)] for a, b in ((200, 400), (800, 1000)))
    assert all(after <= 1.03 * before for before, after in zip(early, late, strict=True)), (early, late)
    manifest = newest_manifest(str(Path(config.run.storage_path) / config.run_name))
    assert manifest is not None
    assert audit_samples(records(config), manifest[1]["cursor"], manifest[1]["returned_ranges"], manifest[1]["skipped_samples"]) == (0, 0)
