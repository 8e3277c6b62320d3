"""What a worker does with records that the transform does not take."""
