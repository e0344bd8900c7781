import os
import random
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from .policy import sample


@dataclass
class CleanPuffeRL:
    exp_name: str
    config: dict
    vecenv: object
    policy: nn.Module

    def __post_init__(self):
        c = self.config
        random.seed(c["seed"])
        np.random.seed(c["seed"])
        torch.manual_seed(c["seed"])
        torch.backends.cudnn.deterministic = c["torch_deterministic"]
        torch.backends.cudnn.benchmark = True
        self.device = torch.device(c["device"])
        self.uncompiled = self.policy.to(self.device)
        if c["compile"]:
            self.policy = torch.compile(self.policy, mode=c["compile_mode"])
        self.optimizer = torch.optim.Adam(self.uncompiled.parameters(), lr=c["learning_rate"], eps=1e-5)
        n, t = c["num_envs"], c["num_steps"]
        dim = self.vecenv.single_observation_space.shape[0]
        z = lambda *s: torch.zeros(*s, device=self.device)
        self.obs, self.actions, self.logp, self.rew, self.done, self.val = z(t, n, dim), z(t, n).long(), z(t, n), z(t, n), z(t, n), z(t, n)
        self.next_obs = torch.as_tensor(self.vecenv.reset(seed=c["seed"])[0], device=self.device, dtype=torch.float32)
        self.next_done, self.global_step = z(n), 0

    @torch.no_grad()
    def evaluate(self):
        for s in range(self.config["num_steps"]):
            self.obs[s], self.done[s] = self.next_obs, self.next_done
            logits, value = self.policy(self.next_obs)
            action, logp, _ = sample(logits)
            self.actions[s], self.logp[s], self.val[s] = action, logp, value
            o, r, term, trunc, _ = self.vecenv.step(action.cpu().numpy())
            self.rew[s] = torch.as_tensor(r, device=self.device, dtype=torch.float32)
            self.next_obs = torch.as_tensor(o, device=self.device, dtype=torch.float32)
            self.next_done = torch.as_tensor(term | trunc, device=self.device).float()
            self.global_step += self.config["num_envs"]

    def train(self):
        c, t0 = self.config, time.time()
        with torch.no_grad():
            next_val = self.policy(self.next_obs)[1].clone()
            adv, last = torch.zeros_like(self.rew), 0
            for s in reversed(range(c["num_steps"])):
                nonterm = 1 - (self.next_done if s == c["num_steps"] - 1 else self.done[s + 1])
                nv = next_val if s == c["num_steps"] - 1 else self.val[s + 1]
                delta = self.rew[s] + c["gamma"] * nv * nonterm - self.val[s]
                adv[s] = last = delta + c["gamma"] * c["gae_lambda"] * nonterm * last
            ret = adv + self.val
        flat = [x.flatten(0, 1) for x in (self.obs, self.actions, self.logp, adv, ret)]
        for _ in range(c["update_epochs"]):
            for idx in torch.randperm(len(flat[0]), device=self.device).chunk(c["minibatches"]):
                o, a, lp, ad, r = (x[idx] for x in flat)
                logits, v = self.policy(o)
                _, newlp, ent = sample(logits, a)
                ratio = (newlp - lp).exp()
                ad = (ad - ad.mean()) / (ad.std() + 1e-8)
                pg = torch.max(-ad * ratio, -ad * ratio.clamp(1 - c["clip_coef"], 1 + c["clip_coef"])).mean()
                loss = pg - c["ent_coef"] * ent.mean() + c["vf_coef"] * 0.5 * ((v - r) ** 2).mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.uncompiled.parameters(), c["max_grad_norm"])
                self.optimizer.step()
        print(f"{self.global_step} loss {loss.item():.4f} mean reward {self.rew.mean().item():.3f} update {time.time() - t0:.2f}s")

    def save_checkpoint(self, folder):
        os.makedirs(folder, exist_ok=True)
        torch.save({"policy": self.uncompiled.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.global_step},
                   os.path.join(folder, f"{self.exp_name}.pt"))
