"""The tables of the keys that programs read from their configs: one module for each program."""

from mpguard.document.schemas import accelerate, axolotl, deepspeed, llamafactory, megatron_bridge, nemo

__all__ = ["accelerate", "axolotl", "deepspeed", "llamafactory", "megatron_bridge", "nemo"]
