import torch


class FlowMatchScheduler:
    def __init__(self, num_train_timesteps=1000, shift=5.0):
        sigmas = torch.linspace(1.0, 0.003 / 1.002, num_train_timesteps)
        self.sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
        self.timesteps = self.sigmas * num_train_timesteps
        w = torch.exp(-2 * ((self.timesteps - num_train_timesteps / 2) / num_train_timesteps) ** 2)
        self.weights = (w - w.min()) * (num_train_timesteps / (w - w.min()).sum())
        self.num_train_timesteps = num_train_timesteps

    def _id(self, timestep):
        return torch.argmin((self.timesteps - timestep.float().cpu()).abs())

    def add_noise(self, x, noise, timestep):
        s = self.sigmas[self._id(timestep)].to(x)
        return (1 - s) * x + s * noise

    def training_target(self, x, noise, timestep):
        return noise - x

    def training_weight(self, timestep):
        return self.weights[self._id(timestep)]
