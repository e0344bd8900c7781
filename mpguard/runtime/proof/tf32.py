"""In which precision torch multiplies FP32 matrices: the switches of cuBLAS, cuDNN and oneDNN."""

from __future__ import annotations

from collections.abc import Mapping

#: The switches: how the proof names them, and torch's backend and operation.
CUDA = {"cuBLAS": ("cuda", "matmul"), "cuDNN convolutions": ("cuda", "conv"), "cuDNN RNNs": ("cuda", "rnn")}
ONEDNN = {
    "oneDNN matmuls": ("mkldnn", "matmul"),
    "oneDNN convolutions": ("mkldnn", "conv"),
    "oneDNN RNNs": ("mkldnn", "rnn"),
}


def read(device: str) -> dict[str, str]:
    """Return the precision of FP32 matmuls by switch: `tf32`, `bf16`, or `ieee` and `none` for FP32.

    device: the type of device that computes. On a CPU the switches of CUDA's libraries are left out: many scripts set
    them on every machine, and torch sets cuDNN's by default.

    torch's older attributes (`allow_tf32`) raise where the newer ones (`fp32_precision`) were set to something else;
    what is read here has the result of both.
    """
    import torch

    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is None:  # before torch 2.9
        if device == "cpu":
            return {}
        cudnn = "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
        cublas = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        return {"cuBLAS": cublas, "cuDNN convolutions": cudnn, "cuDNN RNNs": cudnn}
    switches = {**CUDA, **ONEDNN} if device != "cpu" else ONEDNN
    return {name: str(getter(*switch)) for name, switch in switches.items()}


def compare(found: Mapping[str, str], asked: bool) -> tuple[str, bool]:
    """Return what was found as text, and True if it is what was asked for: TF32 on CUDA, and FP32 elsewhere."""
    on = {name: found[name] == "tf32" for name in CUDA if name in found}
    reduced = [f"{name} in {found[name]}" for name in ONEDNN if found.get(name) in ("tf32", "bf16")]
    lower = [text for text in reduced if not (asked and text.endswith("tf32"))]
    if len(set(on.values())) <= 1:
        text = "on" if any(on.values()) else "off"
    else:
        text = ", ".join(f"{name} {'on' if value else 'off'}" for name, value in on.items())
    return "; ".join([text, *lower]), all(value == asked for value in on.values()) and not lower
