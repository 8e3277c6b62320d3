"""Verification of this project: model, interleavings, simulation, mutations."""
