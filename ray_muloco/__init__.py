"""ray_muloco: pre-train language models with MuLoCo on Ray.

    from ray_muloco import fit, presets
    result = fit(presets.tiny(method="muloco", replicas=4))

Names are resolved on first use: importing the package imports neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ray_muloco import presets
from ray_muloco.config import TrainConfig

if TYPE_CHECKING:
    from ray_muloco.runtime.fit import Result, fit

__version__ = "0.1.0"
__all__ = ["Result", "TrainConfig", "fit", "presets"]
_LAZY = {"fit": "ray_muloco.runtime.fit", "Result": "ray_muloco.runtime.fit"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
