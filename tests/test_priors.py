"""The prior: x̂0 and ε̂ of every kind of network, and its folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddc.errors import UserError
from ddc.networks import WEIGHTS, CompactUNet, run_unet, save_network
from ddc.priors import Prior, Schedule, schedule_from_config, scheduler_config
from ddc.solvers.bridge import Bridge

TINY: dict[str, Any] = {
    "channels": (8, 16),
    "encoder_blocks": (1, 1),
    "decoder_blocks": (1,),
    "groups": 4,
    "head_dim": 8,
}


def make_unet(in_channels: int = 3, out_channels: int = 3) -> CompactUNet:
    torch.manual_seed(0)
    unet = CompactUNet(in_channels, out_channels, **TINY)
    torch.nn.init.normal_(unet.exit.weight, std=0.3)
    return unet.eval().requires_grad_(False)


def make_prior(out_channels: int = 3, **settings: Any) -> Prior:
    config = scheduler_config(**settings)
    return Prior(
        make_unet(out_channels=out_channels),
        schedule_from_config(config),
        prediction_type=config["prediction_type"],
        clamp=settings.get("clamp"),
        scheduler_config=config,
    )


X = torch.linspace(-2, 2, 2 * 3 * 12 * 10).view(2, 3, 12, 10)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("t", [0, 300, 999])
def test_x0_and_noise_explain_x(kind: str, t: int) -> None:
    prior = make_prior(prediction_type=kind)
    prediction = prior.predict(X, t)
    a = float(prior.schedule.alpha_bars[t])
    assert torch.allclose(a**0.5 * prediction.x0 + (1 - a) ** 0.5 * prediction.noise, X, atol=1e-4)
    raw = run_unet(prior.unet, X, t)
    meaning = {
        "epsilon": prediction.noise,
        "v_prediction": a**0.5 * prediction.noise - (1 - a) ** 0.5 * prediction.x0,
        "sample": prediction.x0,
    }
    assert torch.allclose(meaning[kind], raw, atol=1e-4)
    assert prediction.v is None


def test_clamping_touches_x0_alone() -> None:
    free, clamped = make_prior().predict(X, 900), make_prior(clamp=1.0).predict(X, 900)
    assert float(free.x0.abs().max()) > 1
    assert torch.equal(clamped.x0, free.x0.clamp(-1, 1))
    assert torch.equal(clamped.noise, free.noise)


def test_learned_variance_is_an_interpolation() -> None:
    prior = make_prior(out_channels=6, learned_variance=True)
    prediction = prior.predict(X, 500)
    raw = run_unet(prior.unet, X, 500)
    assert torch.equal(prediction.noise, raw[:, :3])
    assert prediction.v is not None
    assert torch.equal(prediction.v, ((raw[:, 3:] + 1) / 2).clamp(0, 1))
    assert float(prediction.v.min()) >= 0 and float(prediction.v.max()) <= 1


def test_one_time_for_each_image() -> None:
    prior = make_prior()
    together = prior.predict(X, torch.tensor([900, 20]))
    assert torch.allclose(together.x0[:1], prior.predict(X[:1], 900).x0, atol=1e-4)
    assert torch.allclose(together.x0[1:], prior.predict(X[1:], 20).x0, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clamp": 1.5, "beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"},
        {"train_steps": 500, "beta_schedule": "scaled_linear", "prediction_type": "sample"},
        {"learned_variance": True, "out_channels": 6},
    ],
)
def test_round_trip_of_a_pipeline_folder(settings: dict[str, Any], tmp_path: Path) -> None:
    prior = make_prior(**settings)
    prior.save_pretrained(tmp_path, shard_mb=0.01)
    assert (tmp_path / "unet" / "config.json").is_file()
    loaded = Prior.from_pretrained(tmp_path)
    assert torch.equal(loaded.schedule.alpha_bars, prior.schedule.alpha_bars)
    assert (loaded.prediction_type, loaded.clamp) == (prior.prediction_type, prior.clamp)
    expected, prediction = prior.predict(X, 300), loaded.predict(X, 300)
    assert torch.equal(prediction.x0, expected.x0)
    assert torch.equal(prediction.noise, expected.noise)
    assert (prediction.v is None) == (expected.v is None)


def test_flat_folders(tmp_path: Path) -> None:
    prior = make_prior(beta_schedule="squaredcos_cap_v2")
    save_network(prior.unet, tmp_path)
    plain = Prior.from_pretrained(tmp_path)  # nothing is said about the schedule: DDPM's own
    assert torch.equal(plain.schedule.alpha_bars, Schedule.linear().alpha_bars)
    (tmp_path / "scheduler_config.json").write_text(json.dumps(prior.scheduler_config))
    loaded = Prior.from_pretrained(tmp_path)
    assert torch.equal(loaded.schedule.alpha_bars, prior.schedule.alpha_bars)
    assert torch.equal(loaded.predict(X, 5).x0, prior.predict(X, 5).x0)


@pytest.mark.parametrize("beta_schedule", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"])
def test_diffusers_reads_the_same_schedule(beta_schedule: str, tmp_path: Path) -> None:
    from diffusers import DDPMScheduler

    prior = make_prior(beta_schedule=beta_schedule)
    prior.save_pretrained(tmp_path)
    theirs = DDPMScheduler.from_pretrained(tmp_path / "scheduler").alphas_cumprod.double()
    ours = prior.schedule.alpha_bars[:-1]
    if beta_schedule == "squaredcos_cap_v2":  # theirs is made in float32 from βs that are 1e-4 each
        assert torch.allclose(theirs, ours, atol=1e-4)
    else:
        assert torch.allclose(theirs, ours, atol=1e-5)


def test_given_betas() -> None:
    schedule = schedule_from_config({"trained_betas": [0.1, 0.2]})
    assert schedule.alpha_bars.tolist() == pytest.approx([0.9, 0.72, 1.0])


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'stairs' is not known; expected linear, .* or sigmoid"):
        schedule_from_config({"beta_schedule": "stairs"})
    with pytest.raises(UserError, match=r"speed.*epsilon, v_prediction or sample"):
        Prior(make_unet(), Schedule.linear(), prediction_type="speed")  # type: ignore[arg-type]


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 3), (1, 1), (3, 12)])
def test_wrong_channels_are_refused(inputs: int, outputs: int, tmp_path: Path) -> None:
    save_network(make_unet(inputs, outputs), tmp_path)
    with pytest.raises(UserError, match=f"{inputs} input and {outputs} output"):
        Prior.from_pretrained(tmp_path)


def test_a_folder_without_weights_is_an_error_and_not_a_random_prior(tmp_path: Path) -> None:
    make_prior().save_pretrained(tmp_path)
    (tmp_path / "unet" / f"{WEIGHTS}.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights"):
        Prior.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="not a folder"):
        Prior.from_pretrained(tmp_path / "nowhere")


def test_a_bridge_is_no_prior(tmp_path: Path) -> None:
    Bridge(make_unet(), "sr4").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is a bridge network.*as i2sb-sr4"):
        Prior.from_pretrained(tmp_path)


def test_only_schedulers_of_ddpms_are_read() -> None:
    for name in ("ScoreSdeVe", "CosineDPMSolverMultistep", "FlowMatchLCM", "CMStochasticIterative", "KarrasVe", "TCD"):
        with pytest.raises(UserError, match=name):
            schedule_from_config({"_class_name": f"{name}Scheduler"})
    with pytest.raises(UserError, match="continuous times"):
        schedule_from_config({"_class_name": "EulerDiscreteScheduler", "timestep_type": "continuous"})
    same = [schedule_from_config({"_class_name": f"{name}Scheduler"}) for name in ("DDIM", "PNDM", "EulerDiscrete")]
    assert all(torch.equal(one.alpha_bars, Schedule.linear().alpha_bars) for one in same)


@pytest.mark.parametrize("prediction_type", ["v_prediction", "sample", "epsilon"])
@pytest.mark.parametrize("zero_snr", [True, False])
def test_x0_is_that_of_diffusers(prediction_type: str, zero_snr: bool, tmp_path: Path) -> None:
    from diffusers import DDIMScheduler

    settings = {"prediction_type": prediction_type, "rescale_betas_zero_snr": zero_snr, "clip_sample": False}
    theirs = DDIMScheduler(beta_start=1e-4, beta_end=0.02, set_alpha_to_one=True, **settings)
    save_network(make_unet(), tmp_path / "unet")
    theirs.save_pretrained(tmp_path / "scheduler")
    if zero_snr and prediction_type == "epsilon":
        with pytest.raises(UserError, match="pure noise"):
            Prior.from_pretrained(tmp_path)
        return
    prior = Prior.from_pretrained(tmp_path)
    theirs.set_timesteps(1000)
    for t in (0, 10, 500, 900, 999):
        raw = run_unet(prior.unet, X, t)
        expected = theirs.step(raw, t, X).pred_original_sample
        assert torch.allclose(prior.predict(X, t).x0, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_x0_of_a_flow_is_that_of_diffusers(shift: float, tmp_path: Path) -> None:
    """One Euler step of diffusers to σ = 0 ends at x̂0."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    save_network(make_unet(), tmp_path / "unet")
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    theirs.save_pretrained(tmp_path / "scheduler")
    prior = Prior.from_pretrained(tmp_path)
    for index, t in ((999, 0), (500, 499), (100, 899), (1, 998)):
        sigma = float(theirs.sigmas[index])
        a = float(prior.schedule.alpha_bars[t])
        assert a == pytest.approx((1 - sigma) ** 2 / ((1 - sigma) ** 2 + sigma**2), rel=1e-3)
        x = ((1 - sigma) ** 2 + sigma**2) ** 0.5 * X  # theirs, of which ours is the variance-preserving form
        velocity = run_unet(prior.unet, x, theirs.timesteps[index].view(1))
        theirs.sigmas = torch.tensor([sigma, 0.0])
        theirs._step_index = 0
        expected = theirs.step(velocity, theirs.timesteps[0], x).prev_sample
        prediction = prior.predict(X, t)
        assert torch.allclose(prediction.x0, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert torch.allclose(a**0.5 * prediction.x0 + (1 - a) ** 0.5 * prediction.noise, X, atol=1e-4)
        theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    assert bool(prior.predict(X, 999).x0.isfinite().all())


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", ["EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"])
def test_x0_of_edm_is_that_of_diffusers(name: str, kind: str, tmp_path: Path) -> None:
    import diffusers

    save_network(make_unet(), tmp_path / "unet")
    theirs = getattr(diffusers, name)(prediction_type=kind, sigma_data=0.7)
    theirs.save_pretrained(tmp_path / "scheduler")
    prior = Prior.from_pretrained(tmp_path)
    for t in (0, 300, 800, 999):
        sigma = float(((1 - prior.schedule.alpha_bars[t]) / prior.schedule.alpha_bars[t]) ** 0.5)
        x = (1 + sigma**2) ** 0.5 * X
        raw = run_unet(prior.unet, theirs.precondition_inputs(x, sigma), theirs.precondition_noise(sigma))
        expected = theirs.precondition_outputs(x, raw, sigma)
        prediction = prior.predict(X, t)
        assert torch.allclose(prediction.x0, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        a = float(prior.schedule.alpha_bars[t])
        assert torch.allclose(a**0.5 * prediction.x0 + (1 - a) ** 0.5 * prediction.noise, X, atol=1e-3)
    ends = ((1 - prior.schedule.alpha_bars[[0, 999]]) / prior.schedule.alpha_bars[[0, 999]]).sqrt()
    assert ends.tolist() == pytest.approx([0.002, 80.0])


@pytest.mark.parametrize("scheduler", ["FlowMatchEulerDiscreteScheduler", "EDMEulerScheduler"])
@pytest.mark.parametrize("solver", ["ddnm", "dps", "ddrm", "pigdm", "reddiff", "diffpir", "dds", "unconditional"])
def test_solvers_run_on_flows_and_edm(scheduler: str, solver: str, tmp_path: Path) -> None:
    from ddc.operators import Bicubic
    from ddc.problems import Problem
    from ddc.solvers import make_solver
    from ddc.solvers.base import Run

    save_network(make_unet(), tmp_path)
    (tmp_path / "scheduler_config.json").write_text(json.dumps({"_class_name": scheduler}))
    prior = Prior.from_pretrained(tmp_path).requires_grad_(False)
    truth = X[..., :8, :8].clamp(-1, 1)
    problem = Problem(Bicubic(2), 0.0)
    out = make_solver(solver, steps=3).solve(Run(problem.measure(truth), problem, prior, [1, 2]))
    assert out.shape == truth.shape and bool(out.isfinite().all())


@pytest.mark.parametrize(
    "settings",
    [
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": "much"},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "invert_sigmas": True},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 10**9},
        {"_class_name": "EDMEulerScheduler", "sigma_min": 90.0},
        {"_class_name": "EDMEulerScheduler", "sigma_max": float("nan")},
        {"_class_name": "EDMEulerScheduler", "prediction_type": "sample"},
        {"_class_name": "EDMEulerScheduler", "sigma_data": 0},
        {"_class_name": ["EDMEulerScheduler"]},
    ],
)
def test_odd_settings_of_flows_and_edm_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    save_network(make_unet(), tmp_path)
    (tmp_path / "scheduler_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError):
        Prior.from_pretrained(tmp_path)


def test_fixed_variances(tmp_path: Path) -> None:
    """fixed_large is β, fixed_small β̃; "learned" is not what learned_range is."""
    save_network(make_unet(), tmp_path)
    for kind, large in (("fixed_small", False), ("fixed_large", True)):
        (tmp_path / "scheduler_config.json").write_text(json.dumps({"variance_type": kind}))
        prior = Prior.from_pretrained(tmp_path)
        v = prior.predict(X, 500).v
        assert (v is not None) == large
        a_t, a_s = prior.schedule.alpha_bars[500], prior.schedule.alpha_bars[400]
        beta = 1 - a_t / a_s
        variance = beta if large else beta * (1 - a_s) / (1 - a_t)
        std = prior.schedule.posterior_std(X, 500, 400, v)
        assert torch.allclose(std, variance.sqrt().float().expand_as(std), rtol=1e-5)
    (tmp_path / "scheduler_config.json").write_text('{"variance_type": "learned"}')
    with pytest.raises(UserError, match="learned_range"):
        Prior.from_pretrained(tmp_path)


def test_the_unet_of_a_pipeline_knows_its_scheduler(tmp_path: Path) -> None:
    prior = make_prior(beta_schedule="squaredcos_cap_v2")
    prior.save_pretrained(tmp_path)
    alone = Prior.from_pretrained(tmp_path / "unet")
    assert torch.equal(alone.schedule.alpha_bars, prior.schedule.alpha_bars)
