"""The streams that an application reads, and those that it does not read any more."""
