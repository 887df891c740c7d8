"""`ddc demo`: what the model that ships does to four photographs, as a page, pictures and a table."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Degrade and restore four photographs for every kind of task; writes a page with before and after."""

    out: Path = Path("demo")
    """Folder for the page, the grids and the pictures."""
    model: Path | None = None
    """The model folder; left out, the one that comes with the package."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    tasks: tuple[str, ...] = ()
    """Only these of the demo's tasks, as sr4 or denoise; left out, all."""
    seed: int = 0
    """Of all randomness."""

    def run(self) -> int:
        from ddc.demo import SETTINGS, run_demo
        from ddc.errors import UserError

        unknown = set(self.tasks) - {setting.task for setting in SETTINGS}
        if unknown:
            known = ", ".join(dict.fromkeys(setting.task for setting in SETTINGS))
            raise UserError(f"the demo has no task {', '.join(sorted(unknown))}; it shows {known}")
        chosen = [s for s in SETTINGS if not self.tasks or s.task in self.tasks]
        page = run_demo(self.out, chosen, self.model, self.device, self.seed)
        print(f"\nopen {page} in a browser")
        return 0
