MAX_FLOW = 400


def sequence_loss(flow_preds, flow_gt, valid, gamma=0.8, max_flow=MAX_FLOW):
    n = len(flow_preds)
    mag = (flow_gt ** 2).sum(dim=1).sqrt()
    valid = (valid >= 0.5) & (mag < max_flow)
    flow_loss = 0.0
    for i, pred in enumerate(flow_preds):
        flow_loss += gamma ** (n - i - 1) * (valid[:, None] * (pred - flow_gt).abs()).mean()
    epe = ((flow_preds[-1] - flow_gt) ** 2).sum(dim=1).sqrt().view(-1)[valid.view(-1)]
    return flow_loss, {"epe": epe.mean().item(), "1px": (epe < 1).float().mean().item()}
