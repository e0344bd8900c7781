import torch


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def policy_loss(log_probs, old_log_probs, advantages, mask, clip_low=0.2, clip_high=0.2):
    ratio = (log_probs - old_log_probs).exp()
    surr1 = ratio * advantages
    surr2 = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return masked_mean(-torch.min(surr1, surr2), mask)
