"""The contents of checkpoints."""

from __future__ import annotations

from lint_facts import facts_of


def test_the_roles_of_states() -> None:
    facts = facts_of(
        """
        import torch
        from torch.amp import GradScaler
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, f)
        scaler = GradScaler()
        state = {"m": model.state_dict(), "o": optimizer.state_dict(), "g": scaler.state_dict()}
        state["s"] = schedule.state_dict()
        torch.save(state, "last.pt")
        before = optimizer.state_dict()
        for each in objects:
            torch.save(each.state_dict(), "x.pt")
        """
    )
    checkpoints = facts.checkpoints
    assert [checkpoints.role(event) for event in facts.events("state")] == [
        "model", "optimizer", "scaler", "other", "optimizer", "",
    ]  # fmt: skip
    (saved,) = checkpoints.saved("optimizer")
    assert [call.name for call in checkpoints.writes(saved)] == ["save"]
    assert checkpoints.unclear("state")
    assert not checkpoints.unclear("restore")
