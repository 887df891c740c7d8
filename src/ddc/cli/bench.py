"""`ddc bench`: speed and memory on this computer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ddc.bench import BenchSettings


@dataclass(frozen=True)
class Bench:
    """Measure the plain loop and the fast path side by side, every solver, and how time and memory grow."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
    """The model folder; left out, the one that comes with the package, or its networks with random weights."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto."""
    paper_size: bool = False
    """Measure the paper's two networks (552.8 M and 113.7 M parameters) with random weights."""
    out: Path | None = None
    """A folder for bench.json and bench.png."""
    json: bool = False
    """Print JSON instead of tables."""
    settings: Annotated[BenchSettings, tyro.conf.arg(name="")] = field(default_factory=BenchSettings)

    def run(self) -> int:
        import json
        import sys

        from rich.console import Console

        from ddc import bench
        from ddc.errors import UserError
        from ddc.pipeline import DEFAULT_MODEL, RestorationPipeline

        if self.paper_size and self.model is not None:
            raise UserError("--paper-size measures the paper's networks; name a model or that, not both")
        folder = self.model or (DEFAULT_MODEL if (DEFAULT_MODEL / "prior").is_dir() else None)
        if self.paper_size:
            folder = None
            prior, network = bench.random_models("adm-256", "paper")
        elif folder is None:
            prior, network = bench.random_models("compact", "compact")
        else:
            pipe = RestorationPipeline.from_pretrained(folder)
            prior, network = pipe.prior, pipe.network  # type: ignore[assignment]
        errors = Console(file=sys.stderr)
        run = bench.Bench(
            prior,
            network,
            self.device,
            self.settings,
            folder,
            say=lambda text: errors.print(f"[dim]{text}[/dim]"),
        )
        try:
            run.run()
        except KeyboardInterrupt:
            run.skip("the rest", "interrupted")
        results = run.results
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "bench.json").write_text(json.dumps(results, indent=2) + "\n")
            try:
                bench.plot(results, self.out / "bench.png")
            except ImportError:
                errors.print("no plot: matplotlib is missing; install it with `pip install ddc\\[eval]`")
        if self.json:
            print(json.dumps(results, indent=2))
        else:
            for table in bench.tables(results):
                Console().print(table)
        return 0
