"""End an application: delete its tables, its announcements and its fan-out consumers."""
