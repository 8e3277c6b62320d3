"""A seeded simulation of whole fleets: production code in virtual time, every I/O call a scheduling
point, one seed decides everything.

    from verification.simulation import simulate
    outcome = simulate(seed=17)
    assert not outcome.violations, outcome.timeline()

What runs is the real code of leases, leader, planning, worker and commit protocol, on the in-memory
Kinesis, the in-memory tables and the in-memory sink; Spark is replaced by a direct writer. The
scheduler is `testing.scheduler`.
"""

from verification.simulation.run import Outcome, simulate
from verification.simulation.storm import StormOptions

__all__ = ["Outcome", "StormOptions", "simulate"]
