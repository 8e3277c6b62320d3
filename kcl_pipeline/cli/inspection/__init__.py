"""Commands that show an application, and change what is recorded of it."""
