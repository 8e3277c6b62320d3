"""Version 2 of kclpy's interface."""
