import torch


def discriminator_loss(real, fake):
    return sum(torch.mean((1 - r.float()) ** 2) + torch.mean(g.float() ** 2) for r, g in zip(real, fake))


def generator_loss(fake):
    return sum(torch.mean((1 - g.float()) ** 2) for g in fake)


def feature_loss(fr, fg):
    return 2 * sum(torch.mean(torch.abs(a.float().detach() - b.float())) for x, y in zip(fr, fg) for a, b in zip(x, y))
