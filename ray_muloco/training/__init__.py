"""The algorithm in one process: replica, coordinator, loop, evaluation, checkpoints, tracking. No Ray."""
