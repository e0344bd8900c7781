"""What torch.compile leaves of a tape: its partitioner saves the inputs of matmuls, and computes the rest again.

The rules are those that AOTAutograd's min-cut partitioner (torch/_functorch/partitioners.py) follows for transformers:
what a matmul or attention reads is saved, since it must exist in the backward pass anyway; the residual stream is
saved once for each block part; results of norms, activations and casts are computed again from those.
"""

from __future__ import annotations

from mpguard.estimate.tape import PRODUCTS, Storage, Tape, Value


def fuse(tape: Tape) -> Tape:
    """Change a tape into that of the compiled model, and return it."""
    _share_casts(tape)
    made = {op.output.storage: op for op in tape.ops if op.name != "view"}
    read = {value.storage for op in tape.ops if op.name in PRODUCTS for value in op.inputs}
    stays = {storage for storage in made if storage in read or _materialized(made[storage].name)}
    stays |= {op.output.storage for op in tape.ops if _is_residual(op.name, op.inputs, op.output)}

    def sources(storage: Storage, seen: set[Storage]) -> set[Storage]:
        """Return what a storage is computed from."""
        if storage in seen:
            return set()
        seen.add(storage)
        op = made.get(storage)
        if op is None or storage in stays:
            return {storage}
        return set().union(*(sources(value.storage, seen) for value in op.inputs)) if op.inputs else {storage}

    for op in tape.ops:
        if op.name not in PRODUCTS:
            op.saved = tuple(set().union(*(sources(storage, set()) for storage in op.saved)) if op.saved else ())
    saved = {storage for op in tape.ops for storage in op.saved}
    for storage in made:
        if storage not in stays and storage not in saved and storage.kind != "weight":
            storage.size = 0
    return tape


def _share_casts(tape: Tape) -> None:
    """Cast each value to a dtype once: autocast does it for every matmul."""
    first: dict[tuple[Storage, int], Storage] = {}
    instead: dict[Storage, Storage] = {}
    for op in tape.ops:
        if op.name == "cast":
            shared = first.setdefault((op.inputs[0].storage, op.output.width), op.output.storage)
            instead[op.output.storage] = shared
            op.output.storage = shared
        op.saved = tuple(dict.fromkeys(instead.get(storage, storage) for storage in op.saved))


def _materialized(name: str) -> bool:
    return name in (*PRODUCTS, "mean", "dropout", "index")


def _is_residual(name: str, inputs: tuple[Value, ...], output: Value) -> bool:
    """True for the sum of two values of one size, as at the end of attention and MLP."""
    return name == "add" and len(inputs) == 2 and all(value.count == output.count for value in inputs)
