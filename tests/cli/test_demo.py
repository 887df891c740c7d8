"""`ddc demo`, on a tiny model."""

from pathlib import Path

import pytest

from ddc.cli import main


def test_the_demo_writes_a_page_that_needs_nothing_from_outside(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddc.demo.SIDE", 128)
    out = tmp_path / "demo"
    code = main(
        [
            "demo",
            "--out",
            str(out),
            "--model",
            str(tiny_model),
            "--device",
            "cpu",
            "--tasks",
            "jpeg10",
            "strokes",
        ]
    )
    assert code == 0
    page = (out / "index.html").read_text()
    assert "http" not in page
    assert page.count("<section>") == 2
    for name in ("astronaut", "coffee", "cat", "rocket"):
        for stem in (f"{name}-jpeg10-before", f"{name}-strokes-after"):
            assert f"pictures/{stem}.png" in page
            assert (out / "pictures" / f"{stem}.png").stat().st_size > 1000
    assert (out / "jpeg10.png").is_file()
    assert (out / "overview.jpg").is_file()
    printed = capsys.readouterr().out
    assert "jpeg10" in printed
    assert "8 restorations" in printed


def test_the_demo_refuses_a_task_it_does_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tasks", "sr5"]) == 2
    assert "the demo has no task sr5" in capsys.readouterr().err
