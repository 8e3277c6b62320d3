"""Programs of the make targets, which the wheel does not contain."""
