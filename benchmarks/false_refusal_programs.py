"""Right programs of all kinds: FP32 weights, gradients and states, products in 16 bits. See false_refusals.py.

Each takes a number of optimizer steps. None of them is of a public project's code.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Program = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Right:
    """A program. steps: of its optimizers together, about. processes, strategy, recipe: what it is launched with."""

    run: Program
    kind: str
    steps: int
    processes: int = 1
    strategy: str = "single"
    recipe: str = "bf16_mixed"


PROGRAMS: dict[str, Right] = {}


def right(kind: str, steps: int = 200, **more: Any) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        PROGRAMS[program.__name__] = Right(program, kind, steps, **more)
        return program

    return add


def amp(dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast("cpu", dtype)


def mlp(*sizes: int, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def adam(owner: Any, lr: float = 1e-3, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(owner.parameters() if isinstance(owner, nn.Module) else owner, lr, **more)


def apply(optimizer: torch.optim.Optimizer, loss: torch.Tensor, clip: float | None = None) -> None:
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([own for group in optimizer.param_groups for own in group["params"]], clip)
    optimizer.step()


@torch.no_grad()
def average(target: nn.Module, source: nn.Module, decay: float = 0.99) -> None:
    for own, other in zip(target.parameters(), source.parameters(), strict=True):
        own.lerp_(other, 1 - decay)


class Block(nn.Module):
    """A block of a transformer with causal attention."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.ffn = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            mlp(width, 4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.ffn(self.norm2(x))  # type: ignore[no-any-return]


class Language(nn.Module):
    """A language model. tied: one matrix for the embedding and the output."""

    def __init__(self, vocabulary: int = 96, width: int = 32, blocks: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))  # type: ignore[no-any-return]


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with amp():
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def log_probability(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with amp():
        logits = model(tokens[:, :-1])
    return logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)


# -- GANs ----------------------------------------------------------------------------------------

Losses = tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
HINGE: Losses = (lambda r, f: F.relu(1 - r).mean() + F.relu(1 + f).mean(), lambda f: -f.mean())
SOFTPLUS: Losses = (lambda r, f: F.softplus(-r).mean() + F.softplus(f).mean(), lambda f: F.softplus(-f).mean())
SQUARES: Losses = (lambda r, f: (r - 1).square().mean() + f.square().mean(), lambda f: (f - 1).square().mean())
CRITIC: Losses = (lambda r, f: f.mean() - r.mean(), lambda f: -f.mean())


def _gan(
    steps: int, losses: Losses, *, act: type[nn.Module] = nn.LeakyReLU, lr: float = 2e-4, after: Any = None,
    extra: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] | None = None, wrap: Any = lambda m: m,
) -> None:  # fmt: skip
    g, d = wrap(mlp(8, 64, 32, act=nn.ReLU)), wrap(mlp(32, 64, 64, 1, act=act))
    og, od = (torch.optim.Adam(model.parameters(), lr, betas=(0.5, 0.999)) for model in (g, d))
    for _ in range(steps // 2):
        real, z = torch.randn(32, 32), torch.randn(32, 8)
        with amp():
            fake = g(z).detach()
            loss = losses[0](d(real), d(fake))
        if extra is not None:
            loss = loss + extra(d, real, fake.float())
        apply(od, loss)
        if after is not None:
            after(g, d)
        with amp():
            loss = losses[1](d(g(z)))
        apply(og, loss)


@right("GAN", 600)
def gan_hinge(steps: int) -> None:
    _gan(steps, HINGE)


@right("GAN", 400)
def gan_softplus(steps: int) -> None:
    _gan(steps, SOFTPLUS, act=nn.Softplus, lr=1e-3)


@right("GAN")
def gan_least_squares(steps: int) -> None:
    _gan(steps, SQUARES)


@right("GAN")
def wgan_clips_weights(steps: int) -> None:
    @torch.no_grad()
    def clip(_g: nn.Module, d: nn.Module) -> None:
        for own in d.parameters():
            own.clamp_(-0.03125, 0.03125)

    _gan(steps, CRITIC, after=clip)


@right("GAN")
def wgan_gradient_penalty(steps: int) -> None:
    def penalty(d: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        mixed = (real + torch.rand(32, 1) * (fake - real)).requires_grad_()
        with amp():
            score = d(mixed).float().sum()
        (made,) = torch.autograd.grad(score, mixed, create_graph=True)
        return 10 * (made.norm(dim=1) - 1).square().mean()

    _gan(steps, CRITIC, extra=penalty)


@right("GAN")
def gan_r1_with_average(steps: int) -> None:
    mean: list[nn.Module] = []

    def r1(d: nn.Module, real: torch.Tensor, _fake: torch.Tensor) -> torch.Tensor:
        real = real.clone().requires_grad_()
        with amp():
            score = d(real).float().sum()
        (made,) = torch.autograd.grad(score, real, create_graph=True)
        return made.square().sum(1).mean()

    def after(g: nn.Module, _d: nn.Module) -> None:
        mean[:] = mean or [copy.deepcopy(g)]
        average(mean[0], g)

    _gan(steps, SOFTPLUS, extra=r1, after=after)


@right("GAN", 300)
def gan_softplus_convolutions(steps: int) -> None:
    g = nn.Sequential(
        nn.Linear(8, 32 * 16), nn.ReLU(), nn.Unflatten(1, (32, 4, 4)), nn.Upsample(scale_factor=2),
        nn.Conv2d(32, 3, 3, padding=1),
    )  # fmt: skip
    d = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 3, padding=1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(512, 1),
    )  # fmt: skip
    og, od = (torch.optim.Adam(model.parameters(), 2e-4, betas=(0.5, 0.999)) for model in (g, d))
    for _ in range(steps // 2):
        real, z = torch.randn(16, 3, 8, 8), torch.randn(16, 8)
        with amp():
            loss = SOFTPLUS[0](d(real), d(g(z).detach()))
        apply(od, loss)
        with amp():
            loss = SOFTPLUS[1](d(g(z)))
        apply(og, loss)


# -- contrastive ---------------------------------------------------------------------------------


def _pairs(scores: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(len(scores))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


@right("contrastive")
def two_views(steps: int) -> None:
    model = mlp(32, 64, 16)
    optimizer = adam(model)
    for _ in range(steps):
        x = torch.randn(32, 32)
        with amp():
            a, b = (F.normalize(model(x + 0.1 * torch.randn_like(x)).float(), dim=1) for _ in range(2))
            loss = _pairs(a @ b.T / 0.1)
        apply(optimizer, loss)


@right("contrastive")
def two_towers_with_temperature(steps: int) -> None:
    image, text, scale = mlp(32, 64, 16), mlp(24, 64, 16), nn.Parameter(torch.tensor(2.6))
    optimizer = adam([*image.parameters(), *text.parameters(), scale])
    for _ in range(steps):
        with amp():
            a, b = F.normalize(image(torch.randn(32, 32)), dim=1), F.normalize(text(torch.randn(32, 24)), dim=1)
            loss = _pairs(scale.exp() * a @ b.T)
        apply(optimizer, loss, clip=1.0)


@right("contrastive")
def triplets(steps: int) -> None:
    model = mlp(32, 64, 16, act=nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    for _ in range(steps):
        with amp():
            a, b, c = (model(torch.randn(32, 32)) for _ in range(3))
            loss = F.triplet_margin_loss(a, b, c)
        apply(optimizer, loss)


@right("contrastive")
def target_network(steps: int) -> None:
    model, head = mlp(32, 64, 16), mlp(16, 32, 16)
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = adam([*model.parameters(), *head.parameters()])
    for _ in range(steps):
        x = torch.randn(32, 32)
        with amp():
            loss = -F.cosine_similarity(head(model(x)), target(x + 0.1)).mean()
        apply(optimizer, loss)
        average(target, model)


# -- preference ----------------------------------------------------------------------------------


@right("preference")
def direct_preference(steps: int) -> None:
    policy = Language()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = adam(policy, 1e-4)
    for _ in range(steps):
        chosen, rejected = torch.randint(0, 96, (2, 8, 12))
        with torch.no_grad():
            base = log_probability(reference, chosen) - log_probability(reference, rejected)
        margin = log_probability(policy, chosen) - log_probability(policy, rejected) - base
        apply(optimizer, -F.logsigmoid(0.1 * margin).mean())


@right("preference")
def reward_pairs(steps: int) -> None:
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = adam(model, 1e-4)
    for i in range(4 * steps):
        with amp():
            a, b = (model(torch.randint(0, 64, (8, 16)))[:, -1, 0] for _ in range(2))
        (-F.logsigmoid(a.float() - b.float()).mean() / 4).backward()
        if i % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@right("preference")
def odds_ratio(steps: int) -> None:
    model = Language()
    optimizer = adam(model, 1e-3)
    for _ in range(steps):
        chosen, rejected = torch.randint(0, 96, (2, 4, 12))
        a, b = log_probability(model, chosen) / 11, log_probability(model, rejected) / 11
        odds = a - torch.log1p(-a.exp()) - b + torch.log1p(-b.exp())
        apply(optimizer, next_token(model, chosen) - 0.1 * F.logsigmoid(odds).mean())


@right("preference")
def sums_that_cancel(steps: int) -> None:
    head = nn.Linear(64, 320, bias=False)
    optimizer = adam(head)
    for _ in range(steps):
        for low, high in ((1.0, 1.5), (-2.9, -2.0)):
            with amp():
                out = head(torch.ones(8, 64) + 0.1 * torch.randn(8, 64))
            (out.float() * torch.empty(320).uniform_(low, high)).mean(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- reinforcement learning ----------------------------------------------------------------------


@right("RL")
def clipped_policy(steps: int) -> None:
    actor, critic = mlp(16, 64, 6, act=nn.Tanh), mlp(16, 64, 1, act=nn.Tanh)
    optimizer = adam([*actor.parameters(), *critic.parameters()], 3e-4, eps=1e-5)
    for _ in range(steps // 4):
        state, action = torch.randn(64, 16), torch.randint(0, 6, (64,))
        with torch.no_grad(), amp():
            old, returns = actor(state).float().log_softmax(-1)[range(64), action], torch.randn(64)
            advantage = returns - critic(state).float().squeeze(-1)
        for _ in range(4):
            with amp():
                logits, value = actor(state).float(), critic(state).float().squeeze(-1)
            log_p = logits.log_softmax(-1)
            ratio = (log_p[range(64), action] - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            entropy = -(log_p.exp() * log_p).sum(-1).mean()
            apply(optimizer, -gain + 0.5 * F.mse_loss(value, returns) - 0.01 * entropy, clip=0.5)


@right("RL")
def group_relative(steps: int) -> None:
    policy = Language()
    optimizer = adam(policy, 1e-4)
    for _ in range(steps):
        tokens, rewards = torch.randint(0, 96, (8, 12)), torch.randint(0, 2, (2, 4)).float()
        advantage = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        log_p = log_probability(policy, tokens)
        ratio = (log_p - log_p.detach()).exp()
        apply(optimizer, -(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)).mean(), clip=1.0)


@right("RL")
def values_of_actions(steps: int) -> None:
    model = mlp(16, 64, 6, act=nn.ReLU)
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    for step in range(steps):
        state, action, reward = torch.randn(32, 16), torch.randint(0, 6, (32,)), torch.randn(32)
        with amp():
            goal = reward + 0.99 * target(torch.randn(32, 16)).float().max(1).values
            loss = F.smooth_l1_loss(model(state).float()[range(32), action], goal)
        apply(optimizer, loss)
        if step % 10 == 9:
            target.load_state_dict(model.state_dict())


@right("RL", 300)
def soft_actor_critic(steps: int) -> None:
    actor, critic, alpha = mlp(16, 32, 8, act=nn.ReLU), mlp(20, 32, 1, act=nn.ReLU), nn.Parameter(torch.zeros(1))
    oa, oc, ot = adam(actor), adam(critic), adam([alpha])
    for _ in range(steps // 3):
        state = torch.randn(32, 16)
        with amp():
            loss = F.mse_loss(critic(torch.randn(32, 20)).float(), torch.randn(32, 1))
        apply(oc, loss)
        with amp():
            mean, spread = actor(state).float().chunk(2, -1)
            action = mean + torch.randn_like(mean) * spread.clamp(-4, 1).exp()
            value = critic(torch.cat([state, action], 1)).float()
        log_p = -spread.sum(1)
        apply(oa, (alpha.exp().detach() * log_p - value.squeeze(1)).mean())
        apply(ot, -(alpha.exp() * (log_p.detach().mean() + 4)).mean())


# -- distillation, diffusion, other models -------------------------------------------------------


@right("distillation")
def distills_logits(steps: int) -> None:
    teacher, student = mlp(32, 96, 10).requires_grad_(False), mlp(32, 32, 10)
    optimizer = adam(student)
    for _ in range(steps):
        x = torch.randn(32, 32)
        with amp():
            a, b = student(x).float() / 2, teacher(x).float() / 2
        apply(optimizer, 4 * F.kl_div(a.log_softmax(-1), b.log_softmax(-1), log_target=True, reduction="batchmean"))


@right("distillation")
def distills_features(steps: int) -> None:
    teacher, student, bridge = mlp(32, 96, 48).requires_grad_(False), mlp(32, 32, 16), nn.Linear(16, 48)
    optimizer = torch.optim.NAdam([*student.parameters(), *bridge.parameters()], 1e-3)
    for _ in range(steps):
        x = torch.randn(32, 32)
        with amp():
            loss = F.mse_loss(bridge(student(x)), teacher(x))
        apply(optimizer, loss)


@right("diffusion")
def denoises(steps: int) -> None:
    model, optimizer = (own := mlp(33, 96, 96, 32, act=nn.SiLU)), adam(own, 1e-3)
    mean = copy.deepcopy(model).requires_grad_(False)
    for _ in range(steps):
        x, noise, t = torch.randn(32, 32), torch.randn(32, 32), torch.rand(32, 1)
        with amp():
            loss = F.mse_loss(model(torch.cat([x * (1 - t).sqrt() + noise * t.sqrt(), t], 1)).float(), noise)
        apply(optimizer, loss, clip=1.0)
        average(mean, model)


@right("diffusion")
def matches_flow_by_convolutions(steps: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)
    )
    optimizer = adam(model, 1e-3)
    for _ in range(steps):
        x, noise, t = torch.randn(8, 3, 8, 8), torch.randn(8, 3, 8, 8), torch.rand(8, 1, 1, 1)
        with amp():
            made = model(torch.cat([x * (1 - t) + noise * t, t.expand(8, 1, 8, 8)], 1))
        apply(optimizer, F.mse_loss(made.float(), noise - x))


@right("diffusion")
def autoencodes_variations(steps: int) -> None:
    encoder, decoder = mlp(32, 64, 16), mlp(8, 64, 32)
    optimizer = torch.optim.Adamax([*encoder.parameters(), *decoder.parameters()], 1e-3)
    for _ in range(steps):
        x = torch.randn(32, 32)
        with amp():
            mean, spread = encoder(x).float().chunk(2, 1)
            made = decoder(mean + torch.randn_like(mean) * (spread / 2).exp()).float()
        apply(optimizer, F.mse_loss(made, x) - 0.01 * (1 + spread - mean.square() - spread.exp()).mean())


@right("classification")
def convolutions_with_norms(steps: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        with amp():
            loss = F.cross_entropy(model(torch.randn(16, 3, 8, 8)), torch.randint(0, 10, (16,)), label_smoothing=0.1)
        apply(optimizer, loss)
        rate.step()


@right("classification")
def recurrent(steps: int) -> None:
    model, head = nn.GRU(16, 32, batch_first=True), nn.Linear(32, 5)
    optimizer = adam([*model.parameters(), *head.parameters()])
    for _ in range(steps):
        with amp():
            loss = F.cross_entropy(head(model(torch.randn(8, 6, 16))[0][:, -1]), torch.randint(0, 5, (8,)))
        apply(optimizer, loss, clip=0.25)


@right("classification")
def zeros_at_the_start(steps: int) -> None:
    model = mlp(32, 64, 10, act=nn.ReLU)
    nn.init.zeros_(model[2].weight)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    for _ in range(steps):
        with amp():
            loss = F.cross_entropy(model(torch.randint(-1, 2, (32, 32)).float()), torch.randint(0, 10, (32,)))
        apply(optimizer, loss)


@right("classification")
def begins_from_bf16_weights(steps: int) -> None:
    model = mlp(32, 64, 10).bfloat16().float()
    optimizer = adam(model, 1e-4, foreach=True)
    for _ in range(steps):
        with amp():
            loss = F.cross_entropy(model(torch.randn(32, 32)), torch.randint(0, 10, (32,)))
        apply(optimizer, loss)


# -- accumulation, and gradients that a script makes ----------------------------------------------


def classify(model: Any, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with amp(dtype):
        return F.cross_entropy(model(torch.randn(16, 32)).float(), torch.randint(0, 10, (16,)))


@right("accumulation")
def accumulates_and_clips(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer = adam(model)
    for i in range(3 * steps):
        (classify(model) / 3).backward()
        if i % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=i % 2 == 0)


@right("accumulation")
def accumulates_then_divides(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer = torch.optim.Adagrad(model.parameters(), 1e-2)
    for i in range(5 * steps):
        classify(model).backward()
        if i % 5 == 4:
            for own in model.parameters():
                own.grad /= 5  # type: ignore[operator]
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()


@right("accumulation")
def adds_in_own_buffers(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer, own = adam(model), list(model.parameters())
    for _ in range(steps):
        buffers = [torch.zeros_like(each) for each in own]
        for _ in range(3):
            classify(model).backward()
            for buffer, each in zip(buffers, own, strict=True):
                buffer.add_(each.grad)  # type: ignore[arg-type]
                each.grad = None
        for buffer, each in zip(buffers, own, strict=True):
            each.grad = buffer / 3
        optimizer.step()


@right("accumulation")
def adds_returned_gradients(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer, own = adam(model), list(model.parameters())
    for _ in range(steps):
        made = [torch.autograd.grad(classify(model), own) for _ in range(4)]
        for each, *parts in zip(own, *made, strict=True):
            each.grad = torch.stack(parts).mean(0)
        optimizer.step()


@right("accumulation")
def projects_two_tasks(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer, own = adam(model), list(model.parameters())
    for _ in range(steps):
        first, second = (torch.autograd.grad(classify(model), own) for _ in range(2))
        dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        share = (dot / sum(b.square().sum() for b in second)).clamp(max=0)
        for each, a, b in zip(own, first, second, strict=True):
            each.grad = a - share * b + b
        optimizer.step()


@right("accumulation")
def minimizes_sharpness(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer, own = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), list(model.parameters())
    for _ in range(steps):
        x, y = torch.randn(16, 32), torch.randint(0, 10, (16,))

        def loss(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            with amp():
                return F.cross_entropy(model(x), y)

        optimizer.zero_grad()
        loss().backward()
        moved = [0.05 * each.grad / (each.grad.norm() + 1e-12) for each in own]  # type: ignore[operator, union-attr]
        with torch.no_grad():
            torch._foreach_add_(own, moved)
        optimizer.zero_grad()
        loss().backward()
        with torch.no_grad():
            torch._foreach_sub_(own, moved)
        optimizer.step()


@right("accumulation")
def adds_noise_and_centers(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer = adam(model)
    for _ in range(steps):
        optimizer.zero_grad()
        classify(model).backward()
        for own in model.parameters():
            own.grad.add_(torch.randn_like(own), alpha=1e-4)  # type: ignore[union-attr]
            if own.ndim > 1:
                own.grad.sub_(own.grad.mean(1, keepdim=True))  # type: ignore[union-attr]
        optimizer.step()


@right("accumulation")
def hooks_scale_gradients(steps: int) -> None:
    def bounded(own: torch.Tensor) -> None:
        own.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]

    model = mlp(32, 64, 10)
    for own in model.parameters():
        own.register_hook(lambda made: made * 0.3)
        own.register_post_accumulate_grad_hook(bounded)
    optimizer = adam(model)
    for _ in range(steps):
        (classify(model) / 2).backward()
        (classify(model) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def _scaled(steps: int, micro: int, scale: float, unscale: bool) -> None:
    model, scaler = mlp(32, 64, 10), torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=20)
    optimizer = adam(model)
    for i in range(micro * steps):
        scaler.scale(classify(model, torch.float16) / micro).backward()
        if i % micro == micro - 1:
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@right("loss scaling", recipe="fp16_mixed")
def scales_and_clips(steps: int) -> None:
    _scaled(steps, 1, 2.0**16, True)


@right("loss scaling", recipe="fp16_mixed")
def scales_and_accumulates(steps: int) -> None:
    _scaled(steps, 4, 2.0**12, False)


# -- language models and their vocabularies ------------------------------------------------------


def _vocabulary(steps: int, size: int, width: int, tied: bool, **more: Any) -> None:
    model = Language(size, width, tied=tied)
    optimizer = adam(model, 3e-4, **more)
    for _ in range(steps):
        apply(optimizer, next_token(model, torch.randint(0, size, (2, 9))), clip=1.0)


@right("vocabulary", 120)
def vocabulary_of_32000(steps: int) -> None:
    _vocabulary(steps, 32_000, 16, False)


@right("vocabulary", 120)
def vocabulary_of_50304_tied(steps: int) -> None:
    _vocabulary(steps, 50_304, 16, True)


@right("vocabulary", 60)
def vocabulary_of_128256(steps: int) -> None:
    _vocabulary(steps, 128_256, 8, False)


@right("vocabulary", 60)
def vocabulary_of_151936_tied(steps: int) -> None:
    _vocabulary(steps, 151_936, 8, True)


@right("vocabulary", 60)
def vocabulary_of_50304_accumulates(steps: int) -> None:
    model = Language(50_304, 16)
    optimizer = adam(model, 3e-4)
    for i in range(3 * steps):
        (next_token(model, torch.randint(0, 50_304, (2, 9))) / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@right("language model")
def warms_up_and_decays_matrices(steps: int) -> None:
    model = Language(tied=True, blocks=2)
    groups = [
        {"params": [own for own in model.parameters() if own.ndim > 1], "weight_decay": 0.1},
        {"params": [own for own in model.parameters() if own.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, 1e-3, betas=(0.9, 0.95), amsgrad=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    for _ in range(steps):
        apply(optimizer, next_token(model, torch.randint(0, 96, (4, 17))), clip=1.0)
        rate.step()


class Adapted(nn.Module):
    """A frozen layer with two small matrices that are trained."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, False), nn.Linear(rank, base.out_features, False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.up(self.down(x))  # type: ignore[no-any-return]


@right("language model")
def adapters_of_low_rank(steps: int) -> None:
    model = Language().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)  # type: ignore[arg-type, assignment]
    optimizer = adam([own for own in model.parameters() if own.requires_grad], 1e-3)
    for _ in range(steps):
        apply(optimizer, next_token(model, torch.randint(0, 96, (4, 17))))


class Experts(nn.Module):
    """Four experts, two for each token, with a loss that balances them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4), nn.ModuleList(mlp(width, 64, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chances = self.router(x).float().softmax(-1)
        top, chosen = chances.topk(2, -1)
        y = torch.zeros_like(x, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(x[rows]).float() * top[rows, slot, None])
        return y, 4 * (chances.mean(0) * F.one_hot(chosen, 4).float().mean((0, 1))).sum()


@right("language model")
def mixture_of_experts(steps: int) -> None:
    model, head = Experts(), nn.Linear(32, 10)
    optimizer = adam([*model.parameters(), *head.parameters()])
    for _ in range(steps):
        with amp():
            hidden, balance = model(torch.randn(64, 32))
            loss = F.cross_entropy(head(hidden), torch.randint(0, 10, (64,))) + 0.01 * balance
        apply(optimizer, loss)


# -- optimizers, and what happens to weights between steps ---------------------------------------


@right("optimizer", 60)
def newton_approximated(steps: int) -> None:
    model = mlp(32, 32, 10)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=6)
    for _ in range(steps):
        x, y = torch.randn(32, 32), torch.randint(0, 10, (32,))

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            with amp():
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


@right("optimizer")
def orthogonalized_momentum(steps: int) -> None:
    model = mlp(32, 64, 10)
    matrices, others = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim <= 1]
    optimizers = [torch.optim.Muon(matrices, 0.02), adam(others)]
    for _ in range(steps // 2):
        classify(model).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@right("optimizer")
def factored_states(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer = torch.optim.Adafactor(model.parameters(), 1e-2)
    for _ in range(steps):
        apply(optimizer, classify(model))


class Lion(torch.optim.Optimizer):
    """An optimizer of the script's own: the sign of an average."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for own in self.param_groups[0]["params"]:
            mean = self.state[own].setdefault("mean", torch.zeros_like(own))
            own.mul_(1 - 1e-4).add_(mean.lerp(own.grad, 0.1).sign_(), alpha=-self.param_groups[0]["lr"])
            mean.lerp_(own.grad, 0.01)


@right("optimizer")
def signs_of_averages(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer = Lion(model.parameters())
    for _ in range(steps):
        apply(optimizer, classify(model))


@right("optimizer")
def projects_rows_to_length_one(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        apply(optimizer, classify(model))
        with torch.no_grad():
            for own in model.parameters():
                if own.ndim > 1:
                    own.div_(own.norm(dim=1, keepdim=True))


@right("optimizer")
def looks_ahead(steps: int) -> None:
    model = mlp(32, 64, 10)
    slow, optimizer = copy.deepcopy(model), torch.optim.RAdam(model.parameters(), 1e-3)
    for step in range(steps):
        apply(optimizer, classify(model))
        if step % 5 == 4:
            average(slow, model, 0.5)
            with torch.no_grad():
                for own, other in zip(model.parameters(), slow.parameters(), strict=True):
                    own.copy_(other)


@right("optimizer")
def evaluates_with_the_average(steps: int) -> None:
    model = mlp(32, 64, 10)
    mean, optimizer = copy.deepcopy(model).requires_grad_(False), adam(model, fused=True)
    for _ in range(steps):
        apply(optimizer, classify(model))
        average(mean, model)
        own = [each.detach().clone() for each in model.parameters()]
        with torch.no_grad():
            for each, other in zip(model.parameters(), mean.parameters(), strict=True):
                each.copy_(other.bfloat16())
            model.eval()
            classify(model)
            model.train()
            for each, kept in zip(model.parameters(), own, strict=True):
                each.copy_(kept)


@right("optimizer")
def prunes_weights(steps: int) -> None:
    model = mlp(32, 64, 10)
    kept = [torch.rand_like(own) > 0.5 for own in model.parameters()]
    optimizer = torch.optim.Adadelta(model.parameters(), 0.5)
    for _ in range(steps):
        apply(optimizer, classify(model))
        with torch.no_grad():
            for own, mask in zip(model.parameters(), kept, strict=True):
                own.mul_(mask)


class Ternary(torch.autograd.Function):
    """Weights of three values in the forward pass, gradients of the exact ones."""

    @staticmethod
    def forward(_ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        scale = weight.abs().mean()
        return (weight / scale).round().clamp(-1, 1) * scale

    @staticmethod
    def backward(_ctx: Any, *made: torch.Tensor) -> torch.Tensor:
        return made[0]


@right("optimizer")
def quantizes_in_the_forward_pass(steps: int) -> None:
    layers = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 10)])
    optimizer = adam(layers)
    for _ in range(steps):

        def model(x: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                x = F.linear(x, Ternary.apply(layer.weight), layer.bias).relu()  # type: ignore[no-untyped-call]
            return x

        apply(optimizer, classify(model))


@right("optimizer")
def weighs_tasks_by_uncertainty(steps: int) -> None:
    body, heads, weights = (
        mlp(32, 64, 32),
        nn.ModuleList(nn.Linear(32, 10) for _ in range(2)),
        nn.Parameter(torch.zeros(2)),
    )
    optimizer = adam([*body.parameters(), *heads.parameters(), weights])
    for _ in range(steps):
        losses = torch.stack([classify(lambda x, h=head: h(body(x))) for head in heads])
        apply(optimizer, ((-weights).exp() * losses + weights).sum())


# -- two processes -------------------------------------------------------------------------------


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


@right("two processes", processes=2, strategy="ddp")
def ddp_clips(steps: int) -> None:
    model = _ddp(mlp(32, 64, 10))
    optimizer = adam(model)
    for _ in range(steps):
        apply(optimizer, classify(model), clip=0.5)


@right("two processes", processes=2, strategy="ddp")
def ddp_accumulates(steps: int) -> None:
    model: Any = _ddp(mlp(32, 64, 10))
    optimizer = adam(model)
    for i in range(3 * steps):
        with model.no_sync() if i % 3 < 2 else contextlib.nullcontext():
            (classify(model) / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@right("two processes", processes=2, strategy="ddp")
def ddp_gan(steps: int) -> None:
    _gan(steps, HINGE, wrap=_ddp)


@right("two processes", processes=2, strategy="ddp")
def reduces_by_hand(steps: int) -> None:
    model = mlp(32, 64, 10)
    optimizer, own = adam(model), list(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        classify(model).backward()
        for each in own:
            torch.distributed.all_reduce(each.grad)
            each.grad /= 2  # type: ignore[operator]
        nn.utils.clip_grad_norm_(own, 0.5)
        optimizer.step()


def _fsdp2(model: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@right("two processes", processes=2, strategy="fsdp2")
def fsdp2_clips(steps: int) -> None:
    model = _fsdp2(mlp(32, 64, 16))
    optimizer = adam(model)
    for _ in range(steps):
        apply(optimizer, model(torch.randn(16, 32)).float().square().mean(), clip=0.5)


@right("two processes", 120, processes=2, strategy="fsdp2")
def fsdp2_accumulates(steps: int) -> None:
    model = _fsdp2(mlp(32, 64, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for i in range(3 * steps):
        model.set_requires_gradient_sync(i % 3 == 2)
        (model(torch.randn(16, 32)).float().square().mean() / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@right("two processes", 120, processes=2, strategy="fsdp1")
def fsdp1_clips(steps: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model: Any = FullyShardedDataParallel(mlp(32, 64, 16), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = adam(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 32)).float().square().mean().backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()


def named(names: Iterable[str]) -> Iterator[tuple[str, Right]]:
    """Yield the programs of some names; all without any."""
    wanted = list(names)
    for name, program in PROGRAMS.items():
        if not wanted or name in wanted:
            yield name, program


def seed(number: int) -> None:
    torch.manual_seed(number + 1000 * int(os.environ.get("RANK") or 0))
