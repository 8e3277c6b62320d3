"""Verification of this project: model, interleaving explorer, simulation and mutation ledger."""
