"""What is recorded of an application: identity, streams, losses, replays and requests."""
