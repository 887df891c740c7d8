"""Deep Data Consistency: restore images in five diffusion steps."""

__version__ = "0.1.0"
