"""What a simulated fleet runs on: scheduler, hosts, calls, Kinesis, streams, sinks and producer."""
