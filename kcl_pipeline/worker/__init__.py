"""One KCL worker: hold leases, read, process, commit, checkpoint, hand off."""
