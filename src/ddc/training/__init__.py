"""Training: the prior, the data-consistency network, the bridge and the denoiser, by one loop."""
