"""The networks that some solvers bring: the bridge's schedule and folder, the denoiser's folder."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ddc.errors import UserError
from ddc.networks import CompactUNet, save_network
from ddc.operators import Bicubic
from ddc.pipeline import load_parts
from ddc.problems import Problem
from ddc.solvers.bridge import CDDB, I2SB, Bridge, BridgeSchedule
from ddc.solvers.gradients import DPS
from ddc.solvers.pnp_admm import DnCNN, PnPADMM

SR4 = Problem(Bicubic(4), 0.0, "sr4")


def tiny_bridge(in_channels: int = 3) -> Bridge:
    unet = CompactUNet(in_channels, channels=(8, 16), encoder_blocks=(1, 1), decoder_blocks=(1,), groups=4, head_dim=8)
    torch.nn.init.normal_(unet.exit.weight, std=0.1)
    return Bridge(unet.eval(), "sr4")


def test_bridge_table() -> None:
    schedule = BridgeSchedule.symmetric()
    betas = torch.diff(schedule.forward, prepend=torch.zeros(1, dtype=torch.float64))
    assert schedule.length == 1000
    assert betas[0].item() == pytest.approx(1e-4)
    assert torch.allclose(betas, betas.flip(0), atol=1e-15)
    # the middle of the square-rooted line from 1e-4 to 3e-4
    middle = (1e-2 + 499 / 999 * (3e-4**0.5 - 1e-2)) ** 2
    assert betas[499].item() == pytest.approx(middle)
    assert torch.allclose(schedule.forward + schedule.backward, betas.sum().expand(1000))
    assert schedule.backward[-1] == 0


def test_bridge_samples_have_the_stated_moments() -> None:
    schedule = BridgeSchedule.symmetric()
    x0, x1 = torch.full((1, 3, 128, 128), 0.5), torch.full((1, 3, 128, 128), -0.25)
    z = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
    for n in (0, 300, 999):
        fwd, bwd = float(schedule.forward[n]), float(schedule.backward[n])
        x = schedule.sample(x0, x1, n, z)
        assert float(x.mean()) == pytest.approx((bwd * 0.5 - fwd * 0.25) / (fwd + bwd), abs=5e-3)
        assert float(x.std()) == pytest.approx((fwd * bwd / (fwd + bwd)) ** 0.5, rel=0.02, abs=1e-6)
    assert torch.equal(schedule.sample(x0, x1, 999, z), x1)


def test_bridge_steps_compose_to_the_bridge() -> None:
    """From x_n ~ q(x_n | x0, x1) the step with the true x0 gives q(x_m | x0, x1): means and variances agree."""
    schedule = BridgeSchedule.symmetric()
    x0, x1 = torch.tensor(0.5).double().view(1, 1, 1, 1), torch.tensor(-0.25).double().view(1, 1, 1, 1)
    zero, unit = torch.zeros_like(x0), torch.ones_like(x0)
    for n, m in [(999, 700), (700, 200), (200, 10)]:
        mean_n = schedule.sample(x0, x1, n, zero)
        var_n = (schedule.sample(x0, x1, n, unit) - mean_n) ** 2
        mean = schedule.step(mean_n, x0, n, m, zero)
        weight = schedule.step(unit, zero, n, m, zero)
        var = weight**2 * var_n + (schedule.step(mean_n, x0, n, m, unit) - mean) ** 2
        expected = schedule.sample(x0, x1, m, zero)
        assert torch.allclose(mean, expected, atol=1e-12)
        assert torch.allclose(var, (schedule.sample(x0, x1, m, unit) - expected) ** 2, atol=1e-12)
    assert torch.equal(schedule.step(x1, x0, 50, 0, unit), schedule.step(x1, x0, 50, 0, zero))  # no noise at 0


def test_bridge_target_and_clean_are_inverse_also_per_image() -> None:
    schedule = BridgeSchedule.symmetric()
    x0, x = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    n = torch.tensor([3, 900])
    assert torch.allclose(schedule.clean(x, schedule.target(x, x0, n), n), x0, atol=1e-6)
    single = schedule.target(x[1:], x0[1:], 900)
    assert torch.allclose(schedule.target(x, x0, n)[1:], single)


def test_bridge_pairs() -> None:
    schedule = BridgeSchedule.symmetric()
    pairs = schedule.pairs(20)
    assert len(pairs) == 20
    assert pairs[0][0] == 999
    assert pairs[-1][1] == 0
    assert all(n > m for n, m in pairs)
    assert all(a[1] == b[0] for a, b in pairwise(pairs))
    assert schedule.pairs(999)[-1] == (1, 0)


def test_bridge_folder_round_trip(tmp_path: Path) -> None:
    bridge = tiny_bridge()
    bridge.save_pretrained(tmp_path / "i2sb-sr4")
    x = torch.rand(1, 3, 16, 16)
    for solver in (I2SB(), CDDB()):
        loaded = load_parts(solver, tmp_path, SR4)["bridge"]
        assert loaded.task == "sr4"
        assert torch.equal(loaded(x, 10), bridge(x, 10))
    beside = tmp_path / "model"
    beside.mkdir()
    assert load_parts(I2SB(), beside, SR4)["bridge"].task == "sr4"


def test_bridge_knows_its_noise_and_speaks_of_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bridge = tiny_bridge()
    bridge.sigma_max = 0.02
    bridge.save_pretrained(tmp_path / "i2sb-sr4")
    for sigma_y, warned in ((0.0, 0), (0.02, 0), (0.05, 1)):
        caplog.clear()
        loaded = load_parts(CDDB(), tmp_path, Problem(Bicubic(4), sigma_y, "sr4"))["bridge"]
        assert loaded.sigma_max == 0.02
        assert sum("at most 0.02, not 0.05" in text for text in caplog.messages) == warned


def test_missing_bridge_says_how_to_train_it(tmp_path: Path) -> None:
    other = Problem(Bicubic(4), 0.0, "no-such-task")
    for solver in (I2SB(), CDDB()):
        with pytest.raises(UserError, match="ddc train i2sb --task no-such-task"):
            load_parts(solver, tmp_path, other)


def test_wrong_bridges_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="3 input"):
        tiny_bridge(6)
    save_network(tiny_bridge().unet, tmp_path / "i2sb-sr4")
    with pytest.raises(UserError, match="names no task"):
        load_parts(I2SB(), tmp_path, SR4)


def test_dncnn_folder_round_trip(tmp_path: Path) -> None:
    network = DnCNN(depth=4, width=8)
    torch.nn.init.normal_(network.layers[-1].weight, std=0.1)
    network.save_pretrained(tmp_path / "dncnn", dtype=torch.float32)
    loaded = load_parts(PnPADMM(), tmp_path, SR4)["denoiser"]
    x = torch.rand(2, 3, 7, 9)
    assert loaded.config == network.config
    assert torch.equal(loaded(x), network(x))
    assert not torch.equal(loaded(x), x)


def test_fresh_dncnn_is_the_identity_and_small() -> None:
    network = DnCNN()
    x = torch.rand(1, 3, 8, 8)
    assert torch.equal(network(x), x)
    assert sum(p.numel() for p in network.parameters()) < 0.6e6


def test_bad_dncnn_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DnCNN(depth=4, width=8).save_pretrained(tmp_path / "dncnn")
    config = tmp_path / "dncnn" / "config.json"
    config.write_text(config.read_text().replace('"width": 8', '"width": 16'))
    with pytest.raises(UserError, match="do not fit"):
        load_parts(PnPADMM(), tmp_path, SR4)
    config.write_text('{"channels": [8]}')
    with pytest.raises(UserError, match="not a DnCNN"):
        load_parts(PnPADMM(), tmp_path, SR4)
    monkeypatch.setattr("ddc.pipeline.find_part", lambda name, model: None)
    with pytest.raises(UserError, match="ddc train dncnn"):
        load_parts(PnPADMM(), tmp_path, SR4)


def test_most_solvers_bring_nothing() -> None:
    assert load_parts(DPS(), None, SR4) == {}
