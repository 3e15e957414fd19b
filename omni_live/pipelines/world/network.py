"""The learned table-top world's networks: pictures become places of things, and flow matching moves the places.

The autoencoder's bottleneck is a handful of slots, each of which is a place and nothing else (keypoints learned from
pictures alone, Jakab et al. 2018, Minderer et al. 2019): a convolution looks for one thing per slot, the mean place of
what it finds is the latent, and a learned sprite is painted there on a learned background. A thing that is remembered
as a place can be misplaced in a long dream, but it can't fade.

The dynamics is a graph network over the slots (interaction networks, Battaglia et al. 2016): what a thing does to
another depends on where it is from there. It is trained as a rectified flow (Liu et al. 2022), x(t) = (1 - t) · noise +
t · move, and estimates the move itself. Rows of a batch are independent of each other, but for rounding.
"""

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, relu, silu

SLOTS: Final = 4
SIDE: Final = 64
CHANNELS: Final = 2
"""Of a latent, float32[2, 1, 4]: each slot's x and y, -1..1 across the picture, y down."""
CONTEXT: Final = 2
"""Latents that the next one depends on, the latest last."""
ACTIONS: Final = 2
"""Actions that a frame takes, of two numbers each."""
STEPS: Final = 4
"""Denoising steps that a frame takes."""

_GRID: Final = 32
_STRICT: Final = 40.0  # how much less likely a colour is found that is unlike the slot's
_SPRITE: Final = 28
_TEXEL: Final = 0.5  # pixels; half of one, so that an edge that falls between two pixels is still an edge
_WIDTH: Final = 96
_ROUNDS: Final = 3  # of messages: the pusher moves a disc, which moves a disc, which holds all of them up
_OCTAVES: Final = 4
_RINGS: Final = 12
_TIMES: Final = 8


class Eyes(nn.Module):
    """Where things are: float32[B, 3, 64, 64] in 0..1 to float32[B, 2, 1, 4]."""

    along: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 5, 2, 2)
        self.second = nn.Conv2d(24, 32, 3, 1, 1)
        self.third = nn.Conv2d(32, SLOTS, 1)
        nn.init.zeros_(self.third.weight)
        self.palette = nn.Parameter(torch.rand(SLOTS, 3))  # what colour each slot looks for, to begin with
        self.register_buffer("along", (torch.arange(_GRID) + 0.5) * (2 / _GRID) - 1, persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        unlike = (avg_pool2d(pictures, 2)[:, None] - self.palette[..., None, None]).square().sum(2)
        found = self.third(relu(self.second(relu(self.first(pictures - 0.5))))) - _STRICT * unlike
        shares = found.flatten(2).softmax(2).unflatten(2, (_GRID, _GRID))
        places = torch.stack([shares.sum(2) @ self.along, shares.sum(3) @ self.along], 1)
        return places[:, :, None]


class Painter(nn.Module):
    """What that looks like: float32[B, 2, 1, 4] to float32[B, 3, 64, 64], about 0..1; later slots cover earlier."""

    pixels: Tensor
    texels: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.background = nn.Parameter(torch.full((3, SIDE, SIDE), 0.5))
        self.colours = nn.Parameter(torch.full((SLOTS, 3, _SPRITE, _SPRITE), 0.5))
        texels = (torch.arange(_SPRITE) - (_SPRITE - 1) / 2) * _TEXEL
        blob = 0.9 * torch.exp(-(texels[:, None] ** 2 + texels**2) / (2 * 3.0**2))
        self.cover = nn.Parameter(torch.logit(blob).repeat(SLOTS, 1, 1))
        self.register_buffer("pixels", torch.arange(SIDE) + 0.5, persistent=False)
        self.register_buffer("texels", texels, persistent=False)

    def forward(self, latents: Tensor) -> Tensor:
        centres = (latents[:, :, 0] + 1) * (SIDE / 2)  # pixels, [B, 2, 4]
        away = self.pixels[:, None] - centres[..., None, None] - self.texels
        columns, rows = relu(1 - away.abs() / _TEXEL).unbind(1)  # [B, 4, 64, 28] each: linear interpolation
        cover = self.cover.sigmoid()
        sprites = torch.cat([self.colours * cover[:, None], cover[:, None]], 1)  # [4, 4, 28, 28]
        painted = rows[:, :, None] @ sprites @ columns[:, :, None].transpose(-1, -2)  # [B, slot, rgba, 64, 64]
        picture: Tensor = self.background
        for sprite in painted.unbind(1):
            picture = picture * (1 - sprite[:, 3:]) + sprite[:, :3]
        return picture


class Autoencoder(nn.Module):
    """Pictures to places and back."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = Eyes()
        self.painter = Painter()

    def forward(self, pictures: Tensor) -> Tensor:
        """float32[B, 3, 64, 64] in 0..1, and what is left of it."""
        painted: Tensor = self.painter(self.eyes(pictures))
        return painted

    @torch.no_grad()
    def begin(self, pictures: Tensor) -> None:
        """Start from what `pictures` (uint8[N, 64, 64, 3]) have in common, and the colours of what they have not."""
        background = floats(pictures.median(0).values[None])[0]
        colours = _palette(floats(pictures), background)
        self.painter.background.copy_(background)
        self.painter.colours.copy_(colours[..., None, None].expand_as(self.painter.colours))
        self.eyes.palette.copy_(colours)


class Interaction(nn.Module):
    """One round of messages between the slots."""

    others: Tensor

    def __init__(self, relation: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.told = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.relation = nn.Linear(relation, _WIDTH, bias=False)
        self.message = nn.Linear(_WIDTH, _WIDTH)
        self.rise = nn.Linear(2 * _WIDTH, 2 * _WIDTH)
        self.fall = nn.Linear(2 * _WIDTH, _WIDTH)
        self.register_buffer("others", 1 - torch.eye(SLOTS)[..., None], persistent=False)

    def forward(self, things: Tensor, relations: Tensor) -> Tensor:
        """float32[B, 4, 96] and float32[B, 4, 4, R] to float32[B, 4, 96]."""
        calm = self.norm(things)
        hears, tells = self.told(calm).chunk(2, -1)
        messages = silu(self.message(silu(hears[:, :, None] + tells[:, None] + self.relation(relations))))
        heard = (messages * self.others).sum(2)
        fallen: Tensor = self.fall(silu(self.rise(torch.cat([calm, heard], -1))))
        return things + fallen


class Dynamics(nn.Module):
    """Where things move: an estimate of the move at the end of the flow."""

    scale: Tensor
    """float32[]: what a move of 1 is in latents."""
    octaves: Tensor
    rings: Tensor
    times: Tensor
    names: Tensor

    def __init__(self) -> None:
        super().__init__()
        seen = 2 + 2 + 2 + 4 * _OCTAVES + 2 * ACTIONS + 2 * _TIMES + SLOTS
        self.enter = nn.Linear(seen, _WIDTH)
        self.rounds = nn.ModuleList(Interaction(2 * (2 + _RINGS)) for _ in range(_ROUNDS))
        self.leave = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.SiLU(), nn.Linear(_WIDTH, 2))
        self.register_buffer("scale", torch.tensor(0.03))
        self.register_buffer("octaves", math.pi * 2.0 ** torch.arange(_OCTAVES), persistent=False)
        self.register_buffer("rings", torch.linspace(0, 0.44, _RINGS), persistent=False)
        self.register_buffer("times", math.pi * torch.arange(_TIMES) / 2, persistent=False)
        self.register_buffer("names", torch.eye(SLOTS), persistent=False)

    def forward(self, x: Tensor, times: Tensor, context: Tensor, actions: Tensor) -> Tensor:
        """The move, float32[B, 2, 1, 4] in units of `scale`, towards which `x` (as that) is on its way.

        `times` is float32[B], 0 noise to 1 move; `context` float32[B, 4, 1, 4], `actions` float32[B, 2, 2].
        """
        before, now = context[:, :, 0].transpose(1, 2).chunk(2, -1)  # [B, 4, 2] each
        moving = x[:, :, 0].transpose(1, 2)
        angles = now[..., None] * self.octaves
        ticks = times[:, None] * self.times
        common = torch.cat([actions.flatten(1), ticks.sin(), ticks.cos()], -1)
        seen = [
            *(now, (now - before) / self.scale, moving, angles.sin().flatten(2), angles.cos().flatten(2)),
            *(common[:, None].expand(-1, SLOTS, -1), self.names.expand(len(x), -1, -1)),
        ]
        things: Tensor = self.enter(torch.cat(seen, -1))
        relations = torch.cat([self._relations(now), self._relations(now + moving * self.scale)], -1)
        for interaction in self.rounds:
            things = interaction(things, relations)
        move: Tensor = self.leave(things)
        return move.transpose(1, 2)[:, :, None]

    def _relations(self, places: Tensor) -> Tensor:
        """Which way and how far each slot is from each other one: float32[B, 4, 2] to float32[B, 4, 4, 14]."""
        ways = places[:, None] - places[:, :, None]
        far = (ways.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        near = torch.exp(-(((far - self.rings) / 0.04) ** 2))
        return torch.cat([ways / far, near], -1)


def stepped(x: Tensor, move: Tensor, times: Tensor) -> Tensor:
    """`x` after one of the flow's `STEPS` steps, that leads straight to `move`."""
    share = 1 / (STEPS * (1 - times))
    return torch.lerp(x, move, share[:, None, None, None])


def floats(images: Tensor) -> Tensor:
    """uint8[B, 64, 64, 3] as the networks take them, float32[B, 3, 64, 64] in 0..1."""
    return images.permute(0, 3, 1, 2).float().div_(255)


def _palette(pictures: Tensor, background: Tensor) -> Tensor:
    """The colours that things have, float32[4, 3]: k-means over what is unlike the background.

    `pictures` is float32[N, 3, 64, 64] in 0..1, `background` float32[3, 64, 64]. It begins from the colour most unlike
    the background's mean, and thrice from the one most unlike those before.
    """
    unlike = (pictures - background).square().sum(1) > 0.4
    colours = pictures.permute(0, 2, 3, 1)[unlike]
    found = [colours[(colours - background.mean((1, 2))).square().sum(1).argmax()]]
    while len(found) < SLOTS:
        found.append(colours[torch.cdist(colours, torch.stack(found)).amin(1).argmax()])
    means = torch.stack(found)
    for _ in range(10):
        nearest = torch.cdist(colours, means).argmin(1)
        means = torch.stack([colours[nearest == at].mean(0) for at in range(SLOTS)])
    return means
