"""Receive records that Kinesis pushes: enhanced fan-out (protocol §10.4)."""
