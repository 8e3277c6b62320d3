"""Read the tables: as the leader, and while another process leads."""
