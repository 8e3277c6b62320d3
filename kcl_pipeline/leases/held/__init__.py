"""The leases that a worker holds."""

from kcl_pipeline.leases.held.lease import Held
from kcl_pipeline.leases.held.leases import HeldLeases
from kcl_pipeline.leases.held.writes import CheckpointWrite

__all__ = ["CheckpointWrite", "Held", "HeldLeases"]
