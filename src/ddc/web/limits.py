"""What the web page allows one visitor."""

from dataclasses import dataclass

from ddc.errors import UserError
from ddc.notation import duration

MOST_FILES = 20  # that are uploaded and restored together
SMALLEST_SIDE = 8  # pixels of a picture


@dataclass(frozen=True)
class Limits:
    """What one visitor may use of a computer that others use too."""

    megapixels: float = 16.0
    """Largest restored picture, in megapixels."""
    minutes: float = 20.0
    """Longest restoration, in minutes."""
    samples: int = 8
    """Largest number of samples of one picture."""
    megabytes: int = 50
    """Largest upload, in megabytes."""
    gigabytes: float = 2.0
    """Room for the files of all visitors together, in gigabytes."""
    queue: int = 20
    """Largest number of visitors who wait at once; further visitors are asked to come back later."""
    keep_minutes: float = 60.0
    """Uploads and results are deleted after this many minutes."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UserError(f"{name} must be above 0, not {value}")

    def check_size(self, height: int, width: int) -> None:
        """Refuse a picture that is too large."""
        if height * width > self.megapixels * 1e6:
            raise UserError(
                f"this would be a picture of {width}×{height} pixels ({height * width / 1e6:.1f} megapixels); this page "
                f"takes up to {self.megapixels:g}. Make it smaller, or use `ddc restore`, which takes any size"
            )

    def check_samples(self, samples: int) -> None:
        """Refuse a number of samples that is not offered."""
        if not 1 <= samples <= self.samples:
            raise UserError(f"the number of samples is {samples}; expected 1 to {self.samples}")

    def check_time(self, seconds: float) -> None:
        """Refuse a restoration that takes too long."""
        if seconds > 60 * self.minutes:
            raise UserError(
                f"this would take about {duration(seconds)}; this page allows {self.minutes:g} minutes. "
                "Use the solver one-pass, fewer steps or samples, or a smaller picture"
            )
