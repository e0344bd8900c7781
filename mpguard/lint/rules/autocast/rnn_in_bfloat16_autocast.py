from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Call, Diagnostic, Dtype, Facts, Good, Note, Object, Region, Rule, any_of

_RNNS = frozenset(f"torch.nn.{module}{name}" for module in ("", "modules.rnn.") for name in ("LSTM", "GRU", "RNN"))


class RnnInBfloat16Autocast(Rule):
    """An LSTM, GRU or RNN under BF16 autocast on a GPU computes in FP16.

    ## What it does
    Reports the call of an `nn.LSTM`, `nn.GRU` or `nn.RNN` inside a `"cuda"` autocast region in BF16, in code that
    trains.

    ## Why is this bad
    Autocast's kernel for cuDNN's RNNs casts to FP16, whatever the region's dtype is (torch 2.13, `AutocastRNN.cpp`,
    observed on an H200). A script for BF16 does not scale the loss: gradients below 6e-8 become zero, and activations
    above 65504 infinite; code that expects BF16 or FP32 stops (rwth-i6/returnn#1529). `mpguard launch` corrects it.

    ## Known limits
    The module must be created and called in the same file; the region may be in another one. Cells (`nn.LSTMCell`)
    compute in the region's dtype.
    """

    code, name = "MPG314", "rnn-in-bfloat16-autocast"
    severity = "warning"
    message = "`{call}` computes in FP16: autocast casts the input of cuDNN's RNNs to FP16, also in a BF16 region"
    help = 'call it in `torch.autocast("cuda", enabled=False)` with FP32 input, or start the run with `mpguard launch`'
    triggers = (any_of(b"LSTM(", b"GRU(", b"RNN("),)
    triggers_nearby = (any_of(b"autocast"), any_of(b"bfloat16", b"bf16"))
    examples = (
        Bad(
            """\
import torch

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(64, 64, batch_first=True)
        self.head = torch.nn.Linear(64, 8)

    def forward(self, x):
        h, _ = self.lstm(x)  # !
        return self.head(h)

model = Tagger().cuda()
for x in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).sum()
    loss.backward()
"""
        ),
        Good(
            """\
from torch import nn

class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.rnn = nn.GRU(dim, dim)

    def forward(self, x):
        return self.rnn(x)[0]
""",
            name="encoder.py",
            files={
                "evaluate.py": """\
import torch
from encoder import Encoder

model = Encoder(80).cuda()
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
    print(model(x).sum())
"""
            },
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if not any(name in facts.calls for name in ("LSTM", "GRU", "RNN")):
            return
        for calls in facts.calls.values():
            for call in calls:
                if call.path and self._is_rnn(call, facts) and not facts.is_inference(call):
                    region = next((each for each, _ in facts.autocasts(call) if self._is_bfloat16(each)), None)
                    if region is not None and region.call is not None:
                        notes = (Note("the region", region.call.span, facts.elsewhere(region.call)),)
                        yield self.at(call, call=facts.short(call.func), notes=notes)

    def _is_rnn(self, call: Call, facts: Facts) -> bool:
        """True if the callee is an RNN of torch in every case."""
        atoms = [each.atom for each in facts.evaluate(call.func, call)]
        return bool(atoms) and all(isinstance(atom, Object) and atom.path in _RNNS for atom in atoms)

    def _is_bfloat16(self, region: Region) -> bool:
        return region.device == "cuda" and {dtype for _, dtype in region.dtypes} == {Dtype.BF16}
