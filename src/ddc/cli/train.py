"""`ddc train`: a prior, a data-consistency network, a bridge or a denoiser."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
        from ddc.networks import build_network, load_network
        from ddc.presets import PRIORS, preset
        from ddc.priors import Prior, schedule_from_config, scheduler_config
        from ddc.training.loop import train
        from ddc.training.prior import PriorObjective

        config = preset(self.network, PRIORS) | {
            "in_channels": 3,
            "out_channels": 6 if self.learned_variance else 3,
        }
        if self.init is not None:
            unet = load_network(self.init / "unet" if (self.init / "unet").is_dir() else self.init)
        else:
            unet = build_network(config)
        scheduler = scheduler_config(
            1000, self.beta_schedule, self.prediction, self.clamp, self.learned_variance
        )
        prior = Prior(unet, schedule_from_config(scheduler), self.prediction, self.clamp, scheduler)
        train(PriorObjective(prior, self.snr_gamma or None), self)
        return 0
