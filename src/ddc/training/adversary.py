"""An adversary for the generator of a posterior network: a critic that tells its samples from photographs.

The critic sees a picture beside the posterior mean of the same measurement, as AlexNet's frozen features (projected GANs,
2111.01007) and as pixels at two scales, and gives one number at each of many places. A sample and the photograph that it
is to be mistaken for share a measurement, so that their numbers are compared in pairs (relativistic, 1807.00734). Spectral
normalisation (1802.05957) keeps the critic smooth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.nn.functional import avg_pool2d, softplus
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import cached

from ddc.errors import UserError, shorten
from ddc.perceptual import unit_length

WIDTH = 96
STRIDES = (2, 2, 2, 1)  # of the critic of pixels
Seen = tuple[Tensor, list[Tensor]]  # a picture, and AlexNet's features of it


def _head(channels: int) -> nn.Sequential:
    """Judges a place by the features around it."""
    return nn.Sequential(
        spectral_norm(nn.Conv2d(2 * channels, WIDTH, 3, padding=1)),
        nn.LeakyReLU(0.2),
        spectral_norm(nn.Conv2d(WIDTH, WIDTH, 3, padding=1)),
        nn.LeakyReLU(0.2),
        spectral_norm(nn.Conv2d(WIDTH, 1, 1)),
    )


def _pixels() -> nn.Sequential:
    """Judges patches of pixels, with finer detail than AlexNet sees."""
    layers: list[nn.Module] = []
    channels = 6
    for i, stride in enumerate(STRIDES):
        width = min(WIDTH * 2, 48 << i)
        layers += [spectral_norm(nn.Conv2d(channels, width, 4, stride, 1)), nn.LeakyReLU(0.2)]
        channels = width
    return nn.Sequential(*layers, spectral_norm(nn.Conv2d(channels, 1, 3, padding=1)))


class Critic(nn.Module):
    """Numbers that are larger for photographs than for samples, one list entry for each network within it."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        """`widths`: the channels of AlexNet's stages."""
        super().__init__()
        self.heads = nn.ModuleList(_head(channels) for channels in widths)
        self.pixels = nn.ModuleList(_pixels() for _ in range(2))

    def forward(self, picture: Seen, mean: Seen) -> list[Tensor]:
        (x, features), (x_mean, features_mean) = picture, mean
        judged = []
        for head, one, other in zip(self.heads, features, features_mean, strict=True):
            scale = one.shape[1] ** 0.5  # so that numbers are about 1
            judged.append(head(torch.cat([scale * unit_length(one.float()), scale * unit_length(other.float())], 1)))
        both = torch.cat([x, x_mean], 1)
        judged += [
            net(avg_pool2d(both, scale) if scale > 1 else both) for net, scale in zip(self.pixels, (1, 2), strict=True)
        ]
        return judged


@dataclass(frozen=True)
class Verdict:
    """What a critic says of samples beside photographs."""

    critic: Tensor  # the loss of the critic
    generator: Tensor  # that of the samples: the numbers of photographs above theirs
    right: Tensor  # share of the places where the critic is right


class Adversary:
    """A critic and its training."""

    def __init__(self, widths: tuple[int, ...], rate: float) -> None:
        self.critic = Critic(widths)
        self.optimiser = torch.optim.Adam(self.critic.parameters(), rate, (0.5, 0.99))

    def to(self, device: torch.device) -> None:
        self.critic.to(device)
        for moments in self.optimiser.state.values():
            moments.update({name: value.to(device) for name, value in moments.items() if value.ndim})

    def judge(self, samples: Seen, photographs: Seen, mean: Seen, weights: Tensor | None = None) -> Verdict:
        """One pass for both losses. The samples' is used before `learn`, which changes the critic; in it, pictures have
        these weights."""
        with cached():  # one spectral normalisation for both
            real, fake = ([numbers.float() for numbers in self.critic(seen, mean)] for seen in (photographs, samples))
        right = torch.stack([(a > b).float().mean() for a, b in zip(real, fake, strict=True)]).mean().detach()
        fixed = [numbers.detach() for numbers in real]
        return Verdict(_losing(real, fake).mean(), _losing(fake, fixed, weights).mean(), right)

    def learn(self, verdict: Verdict) -> None:
        """One step of the critic."""
        parameters = list(self.critic.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(verdict.critic, parameters), strict=True):
            if distributed.is_available() and distributed.is_initialized():
                distributed.all_reduce(gradient, distributed.ReduceOp.AVG)
            parameter.grad = gradient
        self.optimiser.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state, with a first dimension of one."""
        return {name: value.detach().clone()[None] for name, value in self._state()}

    def read(self, path: Path) -> None:
        """Take the state from a file of a checkpoint."""
        try:
            tensors = load_file(path)
            if missing := [name for name, _ in self._state() if name not in tensors]:
                raise KeyError(missing[0])
            self.restore(tensors)
        except (OSError, SafetensorError, RuntimeError, KeyError) as error:
            raise UserError(
                f"{path} does not hold a critic ({shorten(error)}); expected objective.safetensors of a checkpoint of a run "
                "with --w-adversary"
            ) from None

    def restore(self, tensors: dict[str, Tensor]) -> None:
        for parameter in self.critic.parameters():  # the moments appear with the first step
            zero = torch.zeros_like(parameter)
            self.optimiser.state[parameter] = {"step": torch.zeros(()), "exp_avg": zero, "exp_avg_sq": zero.clone()}
        with torch.no_grad():
            for name, value in self._state():
                if name in tensors:
                    value.copy_(tensors[name][0])

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.critic.state_dict().items():
            yield f"critic.{name}", value
        for i, parameter in enumerate(self.critic.parameters()):
            for name, value in self.optimiser.state.get(parameter, {}).items():
                yield f"moments.{i}.{name}", value


def _losing(above: list[Tensor], below: list[Tensor], weights: Tensor | None = None) -> Tensor:
    """The loss of the side whose numbers are to be above, of each picture."""
    losses = torch.stack([softplus(b - a).mean((1, 2, 3)) for a, b in zip(above, below, strict=True)]).mean(0)
    return losses if weights is None else weights * losses


def balanced(score: Tensor, adversary: Tensor, x: Tensor, share: float) -> Tensor:
    """A loss with the value of `score`. Its gradient for the pictures x is that of `score`, and that of `adversary` with
    `share` of the length of the former."""
    (own,) = torch.autograd.grad(score, x, retain_graph=True)
    (other,) = torch.autograd.grad(adversary, x, retain_graph=True)
    factor = share * own.float().norm() / other.float().norm().clamp(min=1e-12)
    return score.detach() + ((x - x.detach()) * (own + factor * other).detach()).sum()
