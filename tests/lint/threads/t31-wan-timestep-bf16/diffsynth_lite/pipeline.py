import torch
import torch.nn.functional as F
from torch import nn

from .flow_match import FlowMatchScheduler
from .wan_dit import WanModel


class WanTrainingModule(nn.Module):
    def __init__(self, dit_path=None, torch_dtype=torch.bfloat16, device="cuda"):
        super().__init__()
        self.torch_dtype, self.device = torch_dtype, device
        self.scheduler = FlowMatchScheduler()
        self.dit = WanModel()
        if dit_path:
            self.dit.load_state_dict(torch.load(dit_path, map_location="cpu"))
        self.dit.to(device=device, dtype=torch_dtype)

    def forward(self, latents, context):
        latents, context = latents.to(self.device, self.torch_dtype), context.to(self.device, self.torch_dtype)
        timestep_id = torch.randint(0, self.scheduler.num_train_timesteps, (1,))
        timestep = self.scheduler.timesteps[timestep_id].to(dtype=self.torch_dtype, device=self.device)
        noise = torch.randn_like(latents)
        noisy = self.scheduler.add_noise(latents, noise, timestep)
        target = self.scheduler.training_target(latents, noise, timestep)
        pred = self.dit(noisy, timestep.expand(latents.shape[0]), context)
        loss = F.mse_loss(pred.float(), target.float())
        return loss * self.scheduler.training_weight(timestep)
