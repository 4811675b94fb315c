"""The baseline of the ray-train-elastic case: Ray Train's elastic mode on the same model, with one worker crashed.

python -m _bench.torch_elastic STORAGE kill|node       prints `no training for X s`: from the crash to the next finished step, less a usual one
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

NUM_WORKERS = 2
STEPS_BEFORE, STEPS_AFTER = 60, 10
CHECKPOINT_STEPS = 20
TIMEOUT_SECONDS = 280.0


def train_loop(settings: dict[str, Any]) -> None:
    """Steps of the plain model on random tokens, from the newest checkpoint; the time of each goes to a file of this process."""
    import ray.train
    import torch
    from ray.train.torch import prepare_model

    from _bench.plain import PlainDecoder, plain_optimizers, plain_step
    from ray_muloco import presets

    torch.set_num_threads(1)
    storage = Path(settings["storage"])
    config = presets.tiny("muloco", NUM_WORKERS)
    plain = PlainDecoder(config.model, 256)
    model, optimizers = prepare_model(plain), plain_optimizers(plain, config)
    step, crashed = 0, (storage / "crashed").exists()
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), weights_only=True)
        step = state["step"]
        plain.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    rank = ray.train.get_context().get_world_rank()
    batch = torch.randint(0, 256, (config.batch_sequences // NUM_WORKERS, config.model.sequence_length + 1))
    last = step + STEPS_AFTER if crashed else 1 << 30
    with (storage / f"{'after' if crashed else 'before'}-{rank}-{os.getpid()}-{os.getppid()}").open("w", buffering=1) as log:
        while step < last:
            plain_step(model, plain, optimizers, batch, config.inner.clip_norm)
            log.write(f"{time.time()}\n")
            step += 1
            if step % CHECKPOINT_STEPS == 0:
                with tempfile.TemporaryDirectory() as directory:
                    if rank == 0:
                        torch.save({"step": step, "model": plain.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}, Path(directory, "state.pt"))
                    ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(directory) if rank == 0 else None)


def times_of(storage: Path, name: str) -> list[float]:
    """When steps ended that the first file of this name lists, ascending."""
    found = next(iter(storage.glob(name)), None)
    return [float(line) for line in found.read_text().splitlines()] if found else []


def crash(storage: Path, kind: str) -> None:
    """Once the workers are well under way, kill the last one's process with -9, or its node."""
    name = f"before-{NUM_WORKERS - 1}-*"
    while len(times_of(storage, name)) < STEPS_BEFORE:
        time.sleep(0.1)
    pid, parent = next(storage.glob(name)).name.split("-")[2:]
    (storage / "crashed").write_text(str(time.time()))
    if kind == "node":
        os.kill(int(parent), signal.SIGKILL)  # the node's raylet, whose child every worker is
    os.kill(int(pid), signal.SIGKILL)


def main() -> None:
    """Start nodes, train, crash, print."""
    storage, kind = Path(sys.argv[1]), sys.argv[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])  # where workers find this file
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from ray_muloco.runtime.cluster import one_node_a_replica

    with one_node_a_replica(NUM_WORKERS, 1):
        threading.Thread(target=crash, args=(storage, kind), daemon=True).start()
        TorchTrainer(
            train_loop,
            train_loop_config={"storage": str(storage)},
            scaling_config=ScalingConfig(num_workers=(1, NUM_WORKERS)),
            run_config=RunConfig(
                storage_path=str(storage / "runs"),
                name="elastic",
                failure_config=FailureConfig(max_failures=5),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        ).fit()
    before = times_of(storage, "before-0-*")
    usual = statistics.median(b - a for a, b in itertools.pairwise(before))
    first = min(t for path in storage.glob("after-*") for t in times_of(storage, path.name)[:1])
    print(f"no training for {first - float((storage / 'crashed').read_text()) - usual:.2f} s")


if __name__ == "__main__":
    main()
