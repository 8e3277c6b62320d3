"""Version 3 of kclpy's interface."""
