"""`ddc bench`: speed and memory on this computer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ddc.evaluation.speed import BenchSettings

if TYPE_CHECKING:
    from ddc.priors import DataConsistency, Prior


@dataclass(frozen=True)
class Bench:
    """Measure the plain loop and the fast path side by side, every solver, and how time and memory grow."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
    """The model folder. Default: the shipped model, or its networks with random weights."""
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

        from ddc.errors import UserError
        from ddc.evaluation import speed, speed_tables

        if self.paper_size and self.model is not None:
            raise UserError("--paper-size measures the paper's networks; give either a model or --paper-size")
        if self.out is not None:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"{self.out} cannot be made ({error.strerror}); choose another --out") from None
        prior, network, folder = self.load()
        training_speed: speed.TrainingSpeed | None = None
        if self.settings.training:
            from ddc.training import speed as of_training

            training_speed = of_training.training_speed
        errors = Console(file=sys.stderr)

        def say(text: str) -> None:
            errors.print(f"[dim]{text}[/dim]")

        run = speed.Bench(prior, network, self.device, self.settings, folder, say, training_speed)
        try:
            run.run()
        except KeyboardInterrupt:
            run.skip("the rest", "interrupted")
        results = run.results
        if self.out is not None:
            (self.out / "bench.json").write_text(json.dumps(results, indent=2) + "\n")
            try:
                speed_tables.plot(results, self.out / "bench.png")
            except ImportError:
                say("no plot, because matplotlib is missing: pip install 'deep-data-consistency\\[eval]'")
        if self.json:
            print(json.dumps(results, indent=2))
        else:
            for table in speed_tables.tables(results):
                Console().print(table)
        return 0

    def load(self) -> "tuple[Prior, DataConsistency | None, Path | None]":
        """The networks to measure, and their folder if they have one."""
        from ddc.errors import UserError
        from ddc.evaluation.speed import random_models
        from ddc.pipeline import DEFAULT_MODEL, RestorationPipeline

        if self.paper_size:
            return *random_models("adm-256", "paper"), None
        folder = self.model or (DEFAULT_MODEL if (DEFAULT_MODEL / "prior").is_dir() else None)
        if folder is None:
            return *random_models("compact", "compact"), None
        pipe = RestorationPipeline.from_pretrained(folder)
        if pipe.latent:
            raise UserError(
                f"{folder} is a latent prior, and `ddc bench` measures priors of pictures; name another model"
            )
        return pipe.prior, pipe.network, folder
