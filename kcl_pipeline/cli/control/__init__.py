"""Commands that change a running application."""
