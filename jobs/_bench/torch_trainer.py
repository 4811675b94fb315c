"""The baseline of the start-up case: the same model in Ray Train's TorchTrainer, as its documentation shows it.

python -m _bench.torch_trainer STORAGE       prints `first inner step after X s`, X from the start of this process
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def train_loop(settings: dict[str, Any]) -> None:
    """One step of the plain model on random tokens; the time at which it ended goes to a file."""
    import ray.train
    import torch
    from ray.train.torch import prepare_model

    from _bench.plain import PlainDecoder, plain_optimizers
    from ray_muloco import presets

    torch.set_num_threads(1)
    config = presets.tiny()
    plain = PlainDecoder(config.model, 256)
    model, optimizers = prepare_model(plain), plain_optimizers(plain, config)
    batch = torch.randint(0, 256, (config.batch_sequences, config.model.sequence_length + 1))
    loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    Path(settings["first_step"]).write_text(str(time.time()))
    ray.train.report({"loss": loss.item()})


def main() -> None:
    """Start Ray, train, print."""
    import psutil

    process_start = psutil.Process().create_time()
    storage = Path(sys.argv[1])
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])  # where the workers find this file
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address="local", include_dashboard=False)
    TorchTrainer(
        train_loop,
        train_loop_config={"first_step": str(storage / "first-step")},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(storage)),
    ).fit()
    print(f"first inner step after {float((storage / 'first-step').read_text()) - process_start:.2f} s")


if __name__ == "__main__":
    main()
