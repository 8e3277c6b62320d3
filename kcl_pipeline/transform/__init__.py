"""Call the user's transform, and handle its rejected rows and errors."""
