"""A seeded simulation of whole fleets: production code in virtual time.

    from verification.simulation import simulate
    outcome = simulate(seed=17)
    assert not outcome.violations, outcome.timeline()

Every I/O call is a scheduling point, and one seed decides everything. The simulation runs the
production code of leases, leader, planning, worker and commit protocol on the in-memory Kinesis,
tables and sink. Streams come, go and return, in two accounts (`verification.simulation.streams`).
A direct writer replaces Spark. The scheduler is `verification.simulation.scheduler`.
"""

from verification.simulation.run import Outcome, simulate
from verification.simulation.storm import StormOptions

__all__ = ["Outcome", "StormOptions", "simulate"]
