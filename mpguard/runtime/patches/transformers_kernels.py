"""Compute the experts of transformers' models in autocast's dtype, and keep `is_causal` of compiled causal models."""

from __future__ import annotations

from mpguard.core.patches import patch
from mpguard.core.tested import TESTED, Window
from mpguard.nn.attention import find_no_packed_sequences, leave_to_eager_code, skip_causal_mask
from mpguard.nn.grouped_mm import autocast_grouped_mm
from mpguard.runtime.patches import checks

#: What is lost without a patch of the masks.
WITH_MASK = "attention may run with a mask: about 13 % slower in BF16"
#: Why the functions that create masks are left to eager code.
ALONE = "the same: dynamo compiles it alone where the loop over FSDP2's blocks is eager (S38)"

patch(
    "transformers.integrations.moe:_grouped_mm",
    needs=("input", "weight", "offs"),
    reason="autocast does not cast its inputs: experts compute in the dtype of their master weights (S30)",
    lost="experts compute in the dtype of their master weights under autocast",
    check=checks.experts,
    tested=Window("5.2", TESTED["transformers"].newest),  # before, experts call torch's operator themselves
    traced=True,
)(autocast_grouped_mm)


patch(
    "transformers.masking_utils:_ignore_causal_mask_sdpa",
    needs=("padding_mask", "kv_length", "local_attention_size"),
    reason="under torch.compile attention gets a mask in place of `is_causal` (S38)",
    lost=WITH_MASK,
    check=checks.attention_with_ones,
    traced=True,
)(skip_causal_mask)


patch(
    "transformers.masking_utils:find_packed_sequence_indices",
    needs=("position_ids",),
    reason="the same: it does not read position ids while it is compiled (S38)",
    lost=WITH_MASK,
    check=checks.attention_without_mask,
    traced=True,
)(find_no_packed_sequences)


patch(
    "transformers.masking_utils:create_causal_mask",
    needs=("config",),
    reason=ALONE,
    lost=WITH_MASK,
    check=checks.attention_without_mask,
    traced=True,
)(leave_to_eager_code)


patch(
    "transformers.masking_utils:create_sliding_window_causal_mask",
    needs=("config",),
    reason=ALONE,
    lost=WITH_MASK,
    check=checks.attention_without_mask,
    traced=True,
)(leave_to_eager_code)


patch(
    "transformers.masking_utils:create_chunked_causal_mask",
    needs=("config",),
    reason=ALONE,
    lost=WITH_MASK,
    check=checks.attention_without_mask,
    traced=True,
)(leave_to_eager_code)
