"""What the hardware at hand multiplies natively. A compute type is chosen once, by the caller, from this answer."""

from __future__ import annotations

import torch


def native_bf16(device: str = "cpu") -> bool:
    """Whether this device multiplies bf16 in hardware, so that bf16 products are faster than fp32 ones.

    CPU: AVX512_BF16 or AMX_BF16 (x86), BF16 (Arm). CUDA: compute capability 8.0 (Ampere) or later. Others: no.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.get_device_capability(torch.device(device))[0] >= 8
    if kind != "cpu":
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name, False)) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))
