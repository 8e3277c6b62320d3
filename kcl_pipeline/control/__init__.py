"""Change a running application at the request of an operator.

The command line and the Dagster jobs call this package. Every write is conditional, and each
function can be called again after an error.
"""
