"""The leases that a worker holds."""

from kcl_pipeline.leases.held.batch_number import INCARNATION_BITS, pending_number
from kcl_pipeline.leases.held.lease import Held
from kcl_pipeline.leases.held.leases import HeldLeases
from kcl_pipeline.leases.held.writes import CheckpointWrite

__all__ = ["INCARNATION_BITS", "CheckpointWrite", "Held", "HeldLeases", "pending_number"]
