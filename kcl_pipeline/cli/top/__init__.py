"""`kcl-pipeline top`: a live page of workers, leases, lag and moves."""
