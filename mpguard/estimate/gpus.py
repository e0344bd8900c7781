"""Memory of GPUs, as `nvidia-smi` reports the total."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpguard.core.errors import ConfigError, did_you_mean, near

MIB = 1024**2

#: Name -> MiB. A name of `mpguard.policy.hardware.GPUS`, with its size where there are several.
MEMORY_MIB: Mapping[str, int] = {
    "p100": 16280, "v100-16gb": 16384, "v100-32gb": 32768, "t4": 15360, "rtx2080": 8192, "a10": 23028, "a40": 46068,
    "a6000": 49140, "rtx3090": 24576, "a100-40gb": 40960, "a100-80gb": 81920, "l4": 23034, "l40s": 46068,
    "rtx4090": 24564, "h100": 81559, "h20": 97871, "gh200": 97871, "h200": 143771, "rtx5090": 32607, "b200": 183359,
    "gb200": 189471, "b300": 275040,
}  # fmt: skip

#: The memory of a GPU in the place of its name.
_SIZE = re.compile(r"(\d{1,4})gi?b")


def memory_of(name: str) -> int:
    """Return the bytes of a GPU: of a name, or of a size such as `24GB`. Raises `ConfigError` for an unknown name."""
    plain = _plain(name)
    if size := _SIZE.fullmatch(plain):
        return int(size[1]) * 1024 * MIB
    if many := re.fullmatch(r"(\d+)[x*](\D.*)", plain):
        raise ConfigError(f"--gpu {name}: one GPU is named here; their number is `--gpus {many[1]} --gpu {many[2]}`")
    several = [each for each in MEMORY_MIB if each.startswith(f"{plain}-")]
    found = MEMORY_MIB.get(plain) or MEMORY_MIB.get(f"{plain}gb") or (MEMORY_MIB[several[0]] if several else None)
    if found is None:
        hint = did_you_mean(plain, MEMORY_MIB) if near(plain, MEMORY_MIB) else ""
        raise ConfigError(f"the memory of the GPU `{name}` is not known{hint or '.'} Or give its size: --gpu 24GB")
    return found * MIB


def architecture(name: str) -> str:
    """Return the name without its size, as `mpguard.policy.hardware.named` knows it; of a size that of an H100."""
    plain = _plain(name)
    return "h100" if _SIZE.fullmatch(plain) else plain.partition("-")[0]


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").removeprefix("nvidia")


def of_this_machine() -> str | None:
    """Return the name of this machine's GPU in the table, by NVML; None without one, or for one that is not in it."""
    from mpguard.policy import hardware

    name = (hardware.detect().gpu or "").lower().replace(" ", "").replace("geforce", "")
    known = [each for each in MEMORY_MIB if each.partition("-")[0] in name]
    sized = [each for each in known if each.partition("-")[2] and each.partition("-")[2] in name]
    return next(iter(sized or sorted(known, key=len, reverse=True)), None)
