"""The settings of training. This module does not import torch, so that the command line shows them quickly."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

_COUNT, _SHARE = (1, math.inf, "1 or more"), (0, 1, "a number from 0 to 1")
_ABOVE_0, _FROM_0 = (1e-300, math.inf, "a number above 0"), (0, math.inf, "a number from 0 on")
# the lowest and highest value of options, and the range in words
LIMITS: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(("steps", "batch_size", "accumulate", "crop", "workers", "save_every", "keep"), _COUNT),
    **dict.fromkeys(
        ("log_every", "validation_limit", "trajectory_steps", "depth", "together", "draws_per_picture"), _COUNT
    ),
    **dict.fromkeys(("memory_share", "ema", "noiseless_share", "wide_share", "eight_bit_share", "sharp_share"), _SHARE),
    **dict.fromkeys(
        (
            "high_share",
            "generator_share",
            "temperature",
            "trajectory_share",
            "sigma",
            "sigma_low",
            "sigma_max",
            "wide_sigma_max",
        ),
        _SHARE,
    ),
    **dict.fromkeys(
        ("minutes", "total_minutes", "clip", "export_every_minutes", "shard_mb", "median", "width", "critic_rate"),
        _ABOVE_0,
    ),
    **dict.fromkeys(("learning_rate", "weight_decay", "seed", "decay_share", "snr_gamma", "holdout"), _FROM_0),
    **dict.fromkeys(
        ("w_mse", "w_lpips", "w_features", "w_kl", "w_pixels", "w_adversary", "lpips_shift", "warmup", "critic_warmup"),
        _FROM_0,
    ),
    **dict.fromkeys(("generator", "generator_wide"), (1e-3, 1e3, "noise levels from 0.001 to 1000")),
    **dict.fromkeys(("betas", "mean_share"), (0, 1 - 1e-9, "a number from 0 to 1, without 1")),
}


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The settings that all kinds of training share."""

    objective: ClassVar[str]  # module:class of what is minimised
    urls: ClassVar = ("data", "validation")  # options that may be URLs

    data: tuple[Path, ...]
    """Folders, tar archives, Parquet or Arrow files of a Hugging Face dataset, or pictures to train on; or their URLs."""
    out: Path
    """Folder for checkpoints, logs and the exported model."""
    steps: int = 10_000
    """Optimiser steps; the schedule ends with them unless --total-minutes is given."""
    minutes: float | None = None
    """Stop and save within this many minutes from now."""
    total_minutes: float | None = None
    """Fit the schedule to this many minutes, summed over resumed runs, instead of --steps."""
    batch_size: int = 32
    """Pictures per process and forward pass."""
    accumulate: int = 1
    """Forward passes per optimiser step."""
    crop: int = 256
    """Side of the square training crops."""
    flip: bool = True
    """Mirror half of the crops."""
    stream: Literal["auto", "on", "off"] = "auto"
    """Decode pictures when they are needed instead of once at the start; auto does so if they do not fit in memory."""
    workers: int = 8
    """Threads that decode pictures."""
    memory_share: float = 0.3
    """Share of the device's memory that decoded pictures may use, with --stream auto."""
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "constant", "decay"] = "cosine"
    """Learning rate schedule: cosine to zero, constant, or constant with a final linear decay."""
    decay_share: float = 0.3
    """With --schedule decay: share of the run, at its end, in which the rate falls to zero."""
    warmup: int = 200
    """Optimiser steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Betas of AdamW."""
    weight_decay: float = 1e-6
    """Weight decay of AdamW."""
    clip: float = 1.0
    """Maximum gradient norm."""
    ema: float = 0.9999
    """Decay of the averaged weights, which are exported; warmed up as (1 + n)/(10 + n)."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the networks; auto is bf16 on CUDA and fp32 elsewhere."""
    compile: bool = False
    """Compile the networks (CUDA; takes one to three minutes at the start)."""
    compile_cache: Path | None = None
    """File that keeps compiled kernels between runs."""
    seed: int = 0
    """Seed of all random numbers."""
    resume: bool = True
    """Continue from the latest checkpoint in --out, if there is one; --no-resume starts again."""
    accept_data: bool = False
    """Resume although the training pictures have changed since the checkpoint."""
    init: Path | None = None
    """Start from the exported model in this folder; ignored if --out has a checkpoint to resume."""
    save_every: int = 1000
    """Optimiser steps between checkpoints."""
    keep: int = 2
    """Number of checkpoints to keep."""
    export_every_minutes: float | None = None
    """Also write the exported model every so many minutes."""
    export_dtype: Literal["fp32", "fp16"] = "fp16"
    """Data type of the exported weights."""
    shard_mb: float | None = None
    """Maximum size of a safetensors file of the exported model, in megabytes."""
    log_every: int = 50
    """Optimiser steps between log lines."""
    holdout: int = 0
    """Keep files whose number is a multiple of this for validation; 0 keeps none."""
    validation: Path | None = None
    """Validation pictures, instead of --holdout."""
    validate_every: int = 0
    """Optimiser steps between validations; 0 validates only at the end."""
    validation_limit: int = 64
    """Maximum number of validation pictures."""
    pictures_every: int = 1000
    """Optimiser steps between grids of example pictures; 0 writes none."""
    checkpoints: bool = True
    """Write full training states; --no-checkpoints writes only the exported model."""


# settings that may change when a run is resumed; the pictures in `data` are compared by themselves
FREE = {
    "accept_data",
    "checkpoints",
    "compile",
    "compile_cache",
    "data",
    "export_dtype",
    "export_every_minutes",
    "keep",
}
FREE |= {"log_every", "memory_share", "minutes", "out", "pictures_every", "resume", "save_every", "shard_mb"}
FREE |= {"steps", "stream", "total_minutes", "validate_every", "validation_limit", "workers"}


@dataclass(frozen=True, kw_only=True)
class PriorSettings(LoopSettings):
    """Train a prior by denoising (DDPM)."""

    objective = "ddc.training.objectives:PriorObjective"

    network: str = "compact"
    """Preset (compact, adm-256) or a JSON file with the network's configuration."""
    prediction: Literal["v_prediction", "epsilon", "sample"] = "v_prediction"
    """What the network predicts."""
    beta_schedule: Literal["linear", "squaredcos_cap_v2"] = "linear"
    """Noise schedule."""
    clamp: float | None = None
    """Clamp x̂0 to ± this value whenever the prior is used."""
    snr_gamma: float = 5.0
    """γ of the min-SNR weights; 0 is the unweighted loss."""
    learned_variance: bool = False
    """Also learn the variance of the reverse step."""


@dataclass(frozen=True, kw_only=True)
class AutoencoderSettings(LoopSettings):
    """Train an autoencoder, for a latent prior."""

    objective = "ddc.training.latent:AutoencoderObjective"

    network: str = "kl-f8"
    """Preset (kl-f8) or a JSON file with the configuration of diffusers' AutoencoderKL."""
    w_lpips: float = 0.5
    """Weight of LPIPS (AlexNet), beside the mean absolute error in [-1, 1] units."""
    lpips_shift: int = 8
    """Shift the pictures by up to this many pixels before LPIPS, which avoids a pattern of its 4-pixel stride."""
    w_kl: float = 1e-4
    """Weight of the KL divergence of the latents from N(0, I), as a mean over their numbers."""


@dataclass(frozen=True, kw_only=True)
class LatentSettings(PriorSettings):
    """Train a latent prior, for the solvers resample, psld and hgu."""

    objective = "ddc.training.latent:LatentObjective"

    autoencoder: Path
    """Folder of the frozen autoencoder: vae/ of `ddc train autoencoder`, or of any diffusers model."""
    network: str = "unet"
    """Preset (unet) or a JSON file with the network's configuration."""
    draws_per_picture: int = 1
    """Number of timesteps and noise samples for each encoded picture of a batch. With 4, the encoder has a quarter of the work."""


@dataclass(frozen=True, kw_only=True)
class MixSettings(LoopSettings):
    """The measurements that a network is trained on."""

    tasks: str = "sr4,sr8,gauss,inpaint92,jpeg10,denoise"
    """Tasks and ranges of tasks (jpeg5-95, gauss0.5-4, sr2-8, inpaint30-95, disc1-6, motion5-25, box32-128), each with an optional weight and LPIPS weight: inpaint92:weight=3:lpips=0.4. disc1-6:photo=0.7:blind=0.2 gives 70 % of them a camera's noise and JPEG, and does not tell the blur of 20 % of those; denoise:photo=0.7:soft=0.3 enlarges 30 % of those first, because cameras' pictures are soft at full size."""
    wide_tasks: str = ""
    """A second mix of tasks, with its own noise and share."""
    sigma_max: float = 0.05
    """Maximum noise of the measurements, in [0, 1] units; drawn uniformly from 0."""
    noiseless_share: float = 0.0
    """Share of the measurements without noise."""
    wide_share: float = 0.5
    """Share of the measurements from --wide-tasks, if given."""
    wide_sigma_max: float = 0.1
    """Maximum noise for --wide-tasks."""
    eight_bit_share: float = 0.5
    """Share of the noiseless measurements of --wide-tasks that are rounded to 8 bits."""
    together: int = 1
    """Number of consecutive pictures that share a task type and are measured in one batch. 8 reduces the idle time of a GPU. Noise, masks and strengths are still drawn for each picture."""


@dataclass(frozen=True, kw_only=True)
class DDCSettings(MixSettings):
    """Train a data-consistency network on a frozen prior (Algorithm 2 of the paper)."""

    objective = "ddc.training.ddc:DDCObjective"

    prior: Path
    """Folder of the frozen prior."""
    network: str = "compact"
    """Preset (compact, paper) or a JSON file with the network's configuration."""
    w_mse: float = 1.0
    """Weight of the mean squared error."""
    w_lpips: float = 0.1
    """Weight of LPIPS (AlexNet) for tasks without one of their own; 0 is the paper's "w/o LPIPS"."""
    lpips_shift: int = 8
    """Shift the pictures by up to this many pixels before LPIPS, which avoids a pattern of its 4-pixel stride; 0 is the paper's loss."""
    w_features: float = 0.0
    """Weight of the distance in the features of the frozen prior, a perceptual loss without another network."""
    w_kl: float = 1e-3
    """Weight of the KL term."""
    trajectory_share: float = 0.0
    """Share of the batch that follows the sampler's own states; 0 is the paper's algorithm."""
    trajectory_steps: tuple[int, ...] = (5,)
    """Numbers of sampling steps of these trajectories."""


@dataclass(frozen=True, kw_only=True)
class PosteriorSettings(MixSettings):
    """Train a posterior network, for the solver posterior: from the least error to a sample. --init also takes a data-consistency network with the inputs wiener, projection, mask and sigma and the residual blend, which is grown."""

    objective = "ddc.training.posterior:PosteriorObjective"

    network: str = "posterior"
    """Preset (posterior) or a JSON file with the network's configuration."""
    mean_share: float = 0.25
    """Share of the pictures at the first step, where the network predicts the posterior mean."""
    high_share: float = 0.1
    """Share of the pictures with noise levels from 1 to 60, drawn log-uniformly."""
    median: float = 0.2
    """Median of the noise levels of the others, which are log-normal, in units of pictures in [-1, 1]."""
    width: float = 1.5
    """Standard deviation of the logarithm of these noise levels."""
    generator_share: float = 0.0
    """Share of the pictures that also train the generator, which draws two samples for each. It needs a network with conditions. Use 1/2, so that the batches of the mean and of the samples have equal size, or 2/3 with --sharp-share 0.5; 0 trains without a generator."""
    generator: tuple[float, ...] = (1.0, 0.25)
    """Noise levels of the generator's evaluations after the mean."""
    generator_wide: tuple[float, ...] = (4.0, 0.5)
    """The same for samples of pictures with wide holes; as many levels as --generator."""
    sharp_share: float = 0.0
    """Share of the generator's pictures that get one sharp estimate instead of two samples. It is trained with pixel, feature and adversarial losses and no diversity term."""
    temperature: float = 1.0
    """Share of the noise levels with which the sharp estimate starts where there are no wide holes; less makes it calmer."""
    w_pixels: float = 1.0
    """Weight of the generator's energy score of pixels, at five scales."""
    w_features: float = 1.0
    """Weight of the generator's energy score of AlexNet's features."""
    w_adversary: float = 0.0
    """Weight of an adversary of the generator: the length of its gradient at the samples, relative to that of the energy scores, less for pictures of which the mean misses little; 0 trains without one."""
    critic_rate: float = 3e-4
    """Learning rate of the adversary's critic."""
    critic: Path | None = None
    """A critic to begin with: the file objective.safetensors of a checkpoint."""
    critic_warmup: int = 300
    """Steps in which the adversary's weight rises from 0."""
    lpips_shift: int = 8
    """Shift the pictures by up to this many pixels before AlexNet sees them, which avoids a pattern of its 4-pixel stride."""


@dataclass(frozen=True, kw_only=True)
class BridgeSettings(LoopSettings):
    """Train the image-to-image bridge of one task (I²SB), for the solvers i2sb and cddb."""

    objective = "ddc.training.objectives:BridgeObjective"

    sigma_max: float = 0.0
    """Maximum noise of the measurements, in [0, 1] units; drawn uniformly from 0."""
    task: str
    """The task, for example sr4 or jpeg10."""
    network: str = "compact"
    """Preset (compact) or a JSON file with the network's configuration."""


@dataclass(frozen=True, kw_only=True)
class DnCNNSettings(LoopSettings):
    """Train the denoiser of the solver pnp-admm (DnCNN)."""

    objective = "ddc.training.objectives:DnCNNObjective"

    crop: int = 64
    """Side of the square training crops."""
    sigma: float = 0.1
    """Noise that the network removes, in [0, 1] units."""
    sigma_low: float | None = None
    """Train on noise drawn uniformly between this and --sigma; by default, on --sigma alone."""
    depth: int = 17
    """Number of convolutions."""
    width: int = 64
    """Channels of the hidden layers."""
