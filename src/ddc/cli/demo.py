"""`ddc demo`: restore four photographs with the shipped model; writes a page, pictures and a table."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Degrade and restore four photographs for every kind of task. Writes a page with the pictures before and after."""

    out: Path = Path("demo")
    """Folder for the page and the pictures."""
    model: Path | None = None
    """The model folder; if left out, the one that is shipped with the package."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    tasks: tuple[str, ...] = ()
    """Only these tasks of the demo, for example sr4 denoise; if left out, all."""
    seed: int = 0
    """Seed of all randomness."""

    def run(self) -> int:
        from ddc.demo import run_demo

        page = run_demo(self.out, self.tasks, self.model, self.device, self.seed)
        print(f"\nopen {page} in a browser")
        return 0
