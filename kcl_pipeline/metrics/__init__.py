"""CPU of this worker by platform, and exporters."""
