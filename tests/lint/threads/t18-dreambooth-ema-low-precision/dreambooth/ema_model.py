import copy

import torch


class EMAModel:
    def __init__(self, model, update_after_step=0, inv_gamma=1.0, power=2 / 3, min_value=0.0, max_value=0.9999, device=None):
        self.averaged_model = copy.deepcopy(model).eval()
        self.averaged_model.requires_grad_(False)
        self.update_after_step = update_after_step
        self.inv_gamma, self.power = inv_gamma, power
        self.min_value, self.max_value = min_value, max_value
        if device is not None:
            self.averaged_model = self.averaged_model.to(device=device)
        self.decay = 0.0
        self.optimization_step = 0

    def get_decay(self, optimization_step):
        step = max(0, optimization_step - self.update_after_step - 1)
        if step <= 0:
            return 0.0
        value = 1 - (1 + step / self.inv_gamma) ** -self.power
        return max(self.min_value, min(value, self.max_value))

    @torch.no_grad()
    def step(self, new_model):
        self.decay = self.get_decay(self.optimization_step)
        params = dict(self.averaged_model.named_parameters())
        for name, p in new_model.named_parameters():
            ema_p = params[name]
            if p.requires_grad:
                ema_p.mul_(self.decay)
                ema_p.add_(p.data.to(dtype=ema_p.dtype), alpha=1 - self.decay)
            else:
                ema_p.copy_(p.to(dtype=ema_p.dtype).data)
        self.optimization_step += 1
