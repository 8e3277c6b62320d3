"""Enhanced fan-out: records pushed by Kinesis (protocol §10.4)."""
