"""The registry: every metric of this package (protocol §12.2).

Metrics of the Java KCL have its name, operation, dimensions and level, so its dashboards work. The
others have names of the same form and `in_kcl=False`.
"""

from typing import Final

from kcl_pipeline.metrics.instruments.catalogue import errors, leader, leases, processing

INSTRUMENTS: Final = (
    *processing.INSTRUMENTS,
    *leases.INSTRUMENTS,
    *leader.INSTRUMENTS,
    *errors.INSTRUMENTS,
)
"""All instruments, in the order of the documented table."""
