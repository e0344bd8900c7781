import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical


def layer_init(layer, std=np.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Policy(nn.Module):
    def __init__(self, obs_dim, n_actions, hidden_size=512):
        super().__init__()
        self.body = nn.Sequential(layer_init(nn.Linear(obs_dim, hidden_size)), nn.ReLU(),
                                  layer_init(nn.Linear(hidden_size, hidden_size)), nn.ReLU())
        self.actor, self.critic = layer_init(nn.Linear(hidden_size, n_actions), 0.01), layer_init(nn.Linear(hidden_size, 1), 1.0)

    def forward(self, obs):
        h = self.body(obs)
        return self.actor(h), self.critic(h).squeeze(-1)


def sample(logits, action=None):
    dist = Categorical(logits=logits)
    action = dist.sample() if action is None else action
    return action, dist.log_prob(action), dist.entropy()
