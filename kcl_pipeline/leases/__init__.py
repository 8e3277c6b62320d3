"""Read and write the tables of an application, and hold its leases."""
