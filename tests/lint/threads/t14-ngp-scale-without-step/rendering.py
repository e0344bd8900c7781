import torch


def ray_march(rays_o, rays_d, t):
    return rays_o[:, None] + rays_d[:, None] * t[..., None]


def weights_from_density(sigma, t):
    delta = torch.cat([t[:, 1:] - t[:, :-1], torch.full_like(t[:, :1], 1e-2)], dim=-1)
    alpha = 1 - torch.exp(-sigma * delta)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], dim=-1), dim=-1)[:, :-1]
    return alpha * trans


def sample_pdf(t, w, n):
    cdf = torch.cumsum(w + 1e-5, dim=-1)
    cdf = cdf / cdf[:, -1:]
    u = torch.rand(t.shape[0], n, device=t.device).sort(dim=-1).values
    idx = torch.searchsorted(cdf, u).clamp(max=t.shape[1] - 1)
    return t.gather(1, idx)


def _render(field, prop, o, d, n, n_prop, near, far, bkgd, proposal_requires_grad):
    t0 = torch.linspace(near, far, n_prop, device=o.device).expand(o.shape[0], -1)
    with torch.set_grad_enabled(proposal_requires_grad):
        w0 = weights_from_density(prop(ray_march(o, d, t0)), t0)
    t = sample_pdf(t0, w0.detach(), n)
    rgb, sigma = field(ray_march(o, d, t), d[:, None].expand(-1, n, -1))
    w = weights_from_density(sigma, t)
    acc = w.sum(-1, keepdim=True)
    color = (w[..., None] * rgb).sum(1) + (1 - acc) * bkgd
    idx = ((t - near) / (far - near) * n_prop).long().clamp(0, n_prop - 1)
    target = torch.zeros_like(w0).scatter_add(1, idx, w.detach())
    prop_loss = ((target - w0).clamp(min=0) ** 2 / (w0 + 1e-7)).sum(-1).mean()
    return color, acc, prop_loss


def render_image_with_propnet(field, prop, rays, n, n_prop, near, far, bkgd, proposal_requires_grad=False, chunk=None):
    o, d = rays
    shape = o.shape[:-1]
    o, d = o.reshape(-1, 3), d.reshape(-1, 3)
    chunk = chunk or o.shape[0]
    outs = [_render(field, prop, o[i:i + chunk], d[i:i + chunk], n, n_prop, near, far, bkgd, proposal_requires_grad)
            for i in range(0, o.shape[0], chunk)]
    color, acc = (torch.cat([x[k] for x in outs]).view(*shape, -1) for k in (0, 1))
    return color, acc, outs[-1][2]
