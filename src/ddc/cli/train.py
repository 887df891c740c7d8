"""`ddc train`: a prior, a data-consistency network, a bridge or a denoiser."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Union

import tyro

from ddc.training.settings import LoopSettings


@dataclass(frozen=True, kw_only=True)
class TrainPrior(LoopSettings):
    """Train a prior by denoising (DDPM)."""

    network: str = "compact"
    """Preset (compact, adm-256) or a JSON file with the network's configuration."""
    prediction: Literal["v_prediction", "epsilon", "sample"] = "v_prediction"
    """What the network predicts; solvers see ε̂ and x̂0 in any case."""
    beta_schedule: Literal["linear", "squaredcos_cap_v2"] = "linear"
    """Noise schedule."""
    clamp: float | None = None
    """Clamp x̂0 to ± this value, in training of networks on it and in sampling alike."""
    snr_gamma: float = 5.0
    """γ of the min-SNR weights; 0 is the plain loss of the target."""
    learned_variance: bool = False
    """Also learn the variance of the reverse step."""

    def run(self) -> int:
        import torch

        from ddc.errors import UserError
        from ddc.networks import build_network
        from ddc.presets import PRIORS, preset
        from ddc.priors import Prior, schedule_from_config, scheduler_config
        from ddc.training.loop import train
        from ddc.training.prior import PriorObjective

        torch.manual_seed(self.seed)
        scheduler = scheduler_config(
            1000, self.beta_schedule, self.prediction, self.clamp, self.learned_variance
        )
        if self.init is not None:
            start = Prior.from_pretrained(self.init)
            then, now = start.scheduler_config, scheduler
            keys = ("num_train_timesteps", "beta_schedule", "prediction_type", "variance_type")
            different = [
                f"{k} was {then[k]} and is {now[k]}" for k in keys if k in then and then[k] != now[k]
            ]
            if different:
                raise UserError(
                    f"the prior in {self.init} was trained otherwise: {'; '.join(different)}. Use the same options, "
                    "or leave --init out"
                )
            unet = start.unet
        else:
            outputs = 6 if self.learned_variance else 3
            unet = build_network(preset(self.network, PRIORS) | {"in_channels": 3, "out_channels": outputs})
        prior = Prior(unet, schedule_from_config(scheduler), self.prediction, self.clamp, scheduler)
        train(PriorObjective(prior, self.snr_gamma or None), self)
        return 0


PAPER_SETTINGS = (
    *((task, sigma) for sigma in (0.0, 0.05) for task in ("sr4", "sr8", "gauss", "inpaint92")),
    ("jpeg10", 0.0),
)


@dataclass(frozen=True, kw_only=True)
class TrainDDC(LoopSettings):
    """Train a data-consistency network on a frozen prior (the paper's Algorithm 2)."""

    prior: Path
    """Folder of the frozen prior."""
    network: str = "compact"
    """Preset (compact, paper) or a JSON file with the network's configuration."""
    tasks: str = "sr4,sr8,gauss,inpaint92,jpeg10,denoise"
    """What to learn: tasks and ranges (jpeg5-95, gauss0.5-4, sr2-8, inpaint30-95, disc1-6, motion5-25, box32-128), with weights after a colon."""
    sigma_max: float = 0.05
    """Largest noise of the measurements, in [0, 1] units; drawn uniformly from 0."""
    noiseless_share: float = 0.0
    """Share of the draws without any noise."""
    wide_tasks: str = ""
    """A second mix of tasks, for what people bring beside the main ones."""
    wide_share: float = 0.5
    """Share of the draws from --wide-tasks, where given."""
    wide_sigma_max: float = 0.1
    """Largest noise for --wide-tasks."""
    eight_bit_share: float = 0.5
    """Share of the noiseless wide draws whose measurement is rounded to 8 bits."""
    w_mse: float = 1.0
    """Weight of the mean squared error."""
    w_lpips: float = 0.1
    """Weight of LPIPS (AlexNet); 0 is the paper's "w/o LPIPS"."""
    w_lpips_of: str = ""
    """Weights of LPIPS for single tasks, in place of --w-lpips: inpaint92=0.4,sr8=0.2."""
    lpips_shift: int = 8
    """Move pictures by up to so many pixels before LPIPS looks at every fourth of them; 0 is the paper's loss, and leaves a weave."""
    w_features: float = 0.0
    """Weight of the distance in the frozen prior's own features: a perceptual loss without another network."""
    w_kl: float = 1e-3
    """Weight of the KL term."""
    trajectory_share: float = 0.0
    """Share of the batch that follows the sampler's own states; 0 is the paper's algorithm."""
    trajectory_steps: tuple[int, ...] = (5,)
    """Lengths of those runs."""

    def run(self) -> int:
        import torch

        from ddc.consistency import DataConsistency
        from ddc.networks import write_out_norms
        from ddc.perceptual import LPIPS
        from ddc.presets import NETWORKS, preset
        from ddc.priors import Prior
        from ddc.training.ddc import DDCObjective, check_schedules
        from ddc.training.features import PriorFeatures
        from ddc.training.loop import train
        from ddc.training.tasks import TaskMix, parse_tasks, task_weights

        torch.manual_seed(self.seed)
        prior = Prior.from_pretrained(self.prior)
        check_schedules(prior, self.init)
        if self.init is not None:
            network = DataConsistency.from_pretrained(self.init)
        else:
            network = DataConsistency.from_config(preset(self.network, NETWORKS))
        mixes = [(1.0, TaskMix(parse_tasks(self.tasks), self.sigma_max, self.noiseless_share))]
        if self.wide_tasks:
            wide = TaskMix(
                parse_tasks(self.wide_tasks), self.wide_sigma_max, self.noiseless_share, self.eight_bit_share
            )
            mixes = [(1 - self.wide_share, mixes[0][1]), (self.wide_share, wide)]
        features = PriorFeatures(prior.unet) if self.w_features else None
        if self.compile:
            write_out_norms(prior.unet).compile(dynamic=False)
            if features is not None:
                features.compile(dynamic=False)
        objective = DDCObjective(
            network,
            prior,
            tuple(mixes),
            LPIPS("alex"),
            self.w_mse,
            self.w_lpips,
            self.w_kl,
            self.trajectory_share,
            self.trajectory_steps,
            self.lpips_shift,
            task_weights(self.w_lpips_of, [task for _, mix in mixes for task in mix.tasks]),
            features,
            self.w_features,
            self._validation_tasks(),
        )
        train(objective, self)
        return 0

    def _validation_tasks(self) -> tuple[tuple[str, float], ...]:
        """Those of the paper's settings that are trained for; else each task of --tasks, with the most noise."""
        from ddc.training.tasks import parse_tasks

        fixed = [
            task.name for task in parse_tasks(self.tasks) if task.family is None and ".py:" not in task.name
        ]
        chosen = tuple(one for one in PAPER_SETTINGS if one[0] in fixed and one[1] <= self.sigma_max)
        return chosen or tuple((task, self.sigma_max) for task in fixed) or PAPER_SETTINGS


@dataclass(frozen=True, kw_only=True)
class TrainBridge(LoopSettings):
    """Train the image-to-image bridge of one task (I²SB), which i2sb and cddb need."""

    task: str
    """The task, for example sr4 or jpeg10."""
    network: str = "compact"
    """Preset (compact) or a JSON file with the network's configuration."""
    sigma_max: float = 0.0
    """Largest noise of the measurements, in [0, 1] units; drawn uniformly from 0."""

    def run(self) -> int:
        import torch

        from ddc.networks import build_network
        from ddc.perceptual import LPIPS
        from ddc.presets import BRIDGES, preset
        from ddc.solvers.bridge import Bridge
        from ddc.training.bridge import BridgeObjective
        from ddc.training.loop import train
        from ddc.training.tasks import TaskMix, single_task

        torch.manual_seed(self.seed)
        mix = TaskMix((single_task(self.task),), self.sigma_max)
        if self.init is not None:
            bridge = Bridge.from_pretrained(self.init)
            bridge.task = self.task  # a network of another task is a good start
        else:
            config = preset(self.network, BRIDGES) | {"in_channels": 3, "out_channels": 3}
            bridge = Bridge(build_network(config), self.task)
        train(BridgeObjective(bridge, mix, LPIPS("alex")), self)
        return 0


@dataclass(frozen=True, kw_only=True)
class TrainDnCNN(LoopSettings):
    """Train the denoiser that pnp-admm needs (DnCNN)."""

    crop: int = 64
    """Side of the square training crops."""
    sigma: float = 0.1
    """Noise to take away, in [0, 1] units."""
    sigma_low: float | None = None
    """Train on noise drawn uniformly between this and --sigma; left out, on --sigma alone."""
    depth: int = 17
    """Convolutions."""
    width: int = 64
    """Channels between them."""

    def run(self) -> int:
        import torch

        from ddc.errors import UserError
        from ddc.perceptual import LPIPS
        from ddc.problems import check_sigma
        from ddc.solvers.dncnn import DnCNN
        from ddc.training.dncnn import DnCNNObjective
        from ddc.training.loop import train

        torch.manual_seed(self.seed)
        low = self.sigma if self.sigma_low is None else self.sigma_low
        for level in (low, self.sigma):
            check_sigma(level)
        if low > self.sigma:
            raise UserError(
                f"--sigma-low {low} lies above --sigma {self.sigma}; give the smaller number there"
            )
        if self.init is not None:
            network = DnCNN.from_pretrained(self.init)
        else:
            network = DnCNN(self.depth, self.width, self.sigma)
        train(DnCNNObjective(network, low, self.sigma, LPIPS("alex")), self)
        return 0


Train = Union[  # noqa: UP007 (tyro reads the annotations of each member)
    Annotated[TrainPrior, tyro.conf.subcommand("prior")],
    Annotated[TrainDDC, tyro.conf.subcommand("ddc")],
    Annotated[TrainBridge, tyro.conf.subcommand("i2sb")],
    Annotated[TrainDnCNN, tyro.conf.subcommand("dncnn")],
]
