"""The registry of metrics: names, units, kinds, dimensions, levels, and the events that feed them.

`catalogue.INSTRUMENTS` is the registry. `conversion.observations` turns an event into values.
"""
