"""The Dagster layer: definitions, assets, checks, jobs, leader sensor, resources and component.

The only package that imports dagster.
"""
