"""A seeded simulation of whole fleets: production code in virtual time.

    from verification.simulation import simulate
    outcome = simulate(seed=17)
    assert not outcome.violations, outcome.timeline()

Every I/O call is a scheduling point, and one seed decides everything. The simulation runs the
production code of leases, leader, planning, worker and commit protocol on the in-memory Kinesis,
tables and sink. Streams come, go and return, in two accounts. A direct writer replaces Spark.

- `environment`: the scheduler, hosts, I/O calls, Kinesis, streams, sinks and the producer.
- `incidents`: the incidents, what a seed draws from, and the storm.
- `checks`: the invariants.
"""

from verification.simulation.incidents.storm import StormOptions
from verification.simulation.run import Outcome, simulate

__all__ = ["Outcome", "StormOptions", "simulate"]
