"""The user's transform: how it is called, what it may return, and what its errors say."""
